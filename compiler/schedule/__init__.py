"""When and where code of a core runs: addresses on chip and in HBM, queues of engines, order of
kernels and physical cores.
"""
