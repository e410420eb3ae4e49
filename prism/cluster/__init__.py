"""A GPU cluster that schedules jobs whose run times are uncertain.

`read_jobs` gives a job log, `run_cluster` one run of a policy on it, `compare_estimates` policies, overrun rules and
estimators over the same real run times.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
