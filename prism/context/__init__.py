"""A step model from a spec: a job's workload, parallelism and topology, and what its ops cost."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
