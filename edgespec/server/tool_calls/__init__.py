"""Function calls and thoughts in a model's text: its own form, read while it comes, and forced by a grammar.

forms.py finds the form of a template's calls, reader.py splits a text into plain text, thoughts and calls,
forcing.py writes the grammar of a call in that form.
"""
