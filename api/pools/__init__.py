"""Shows and changes pools of free workers and their rollouts, by calls of their workflows.

Not here: the sizing (`workflows/worker_pool`) and the launches (`activities/pool`).
"""
