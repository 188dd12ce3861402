"""What a user reads: report.json, the screen, memory and sharding explanations, limits.

`report.py` builds the report; `screen.py` prints it, `page/` writes it as HTML, `compare.py` says
what is different between two.
"""
