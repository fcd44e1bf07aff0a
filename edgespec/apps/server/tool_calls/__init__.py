"""Tool calls and thoughts in a model's text: read in its own form, and forced by a grammar.

call_forms.py finds the form of a template's calls, call_parser.py parses a call, answer_reader.py splits a
text into plain text, thoughts and calls, forced_grammar.py writes the grammar of a call in that form.
"""
