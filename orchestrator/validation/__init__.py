"""Published runs against predictions: reading the rows, predicting them, fitting, the page.

`validate.py` is the command; `predict.py` the road of one row.
"""
