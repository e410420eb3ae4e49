from .fitting.coupling import (
    CouplingFit as CouplingFit,
)
from .fitting.coupling import (
    fit_coupling as fit_coupling,
)
from .fitting.gaps import (
    kept_kinds as kept_kinds,
)
from .fitting.model import (
    MIN_STEPS as MIN_STEPS,
)
from .fitting.model import (
    borrowing as borrowing,
)
from .fitting.model import (
    choose_gaps as choose_gaps,
)
from .fitting.model import (
    fit_model as fit_model,
)
from .fitting.model import (
    fit_pools as fit_pools,
)
from .fitting.model import (
    model_from_trace as model_from_trace,
)
from .gap_ops import (
    remove_gaps as remove_gaps,
)
from .graph import (
    TraceGraph as TraceGraph,
)
from .graph import (
    build_graph as build_graph,
)
from .measured_steps import (
    MeasuredSteps as MeasuredSteps,
)
from .measured_steps import (
    measure_steps as measure_steps,
)
from .measured_steps import (
    observe as observe,
)
from .measured_steps import (
    replay as replay,
)
from .reading import (
    read_trace as read_trace,
)
from .recording import (
    record as record,
)
from .records import (
    TraceError as TraceError,
)
from .records import (
    TraceWarning as TraceWarning,
)
from .stragglers import persistent_stragglers as persistent_stragglers
from .stragglers import slowdown_by_group as slowdown_by_group
from .synthetic import synthetic_steps as synthetic_steps
from .time_breakdown import (
    breakdown as breakdown,
)
from .time_breakdown import (
    compare_traces as compare_traces,
)
from .time_breakdown import (
    extra_days as extra_days,
)
