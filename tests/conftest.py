"""Settings of the test process, made before anything imports NumPy or jax."""

from __future__ import annotations

import os

from hypothesis import settings

# Simulated ranks run on threads of ours and tests in several processes, so BLAS must not add its
# own threads. XLA is asked for eight CPU devices: it is the oracle of eight-way partitioning.
for library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
