"""`report.html`: a report as one file that opens offline, without scripts.

`page.py` fills the templates; `charts.py` says where everything of a drawing lies.
"""
