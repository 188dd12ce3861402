"""What-ifs: changes of a job, and what becomes of it with them. Every answer is one of the whole
road (`orchestrator/road/plan_cache.py`)."""
