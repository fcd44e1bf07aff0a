"""Tool calls and thoughts in a model's text: read in its own form as they come, and forced by a grammar.

call_forms.py finds the form of a template's calls, answer_reader.py splits a text into plain text, thoughts
and calls, forced_grammar.py writes the grammar of a call in that form.
"""
