"""What lowering and code generation decided, as texts for people: fusion, tiling, memory over time,
what the engines do at the same time. Steps of the compiler note them (`compiler/steps.py`).
"""
