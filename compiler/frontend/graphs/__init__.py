"""Graphs of operators that other frameworks write as files: what their forms share."""
