from .analytic_model import (
    analytic_pools as analytic_pools,
)
from .analytic_model import (
    assumed_coupling as assumed_coupling,
)
from .analytic_model import (
    build_dag as build_dag,
)
from .analytic_model import (
    deterministic_step as deterministic_step,
)
from .analytic_model import (
    model_from_context as model_from_context,
)
from .calibration import (
    calibrate as calibrate,
)
from .calibration import (
    fit_efficiency as fit_efficiency,
)
from .calibration import (
    leave_one_out as leave_one_out,
)
from .context import (
    Context as Context,
)
from .context import (
    Gpu as Gpu,
)
from .context import (
    Link as Link,
)
from .context import (
    Parallelism as Parallelism,
)
from .context import (
    Recommender as Recommender,
)
from .context import (
    StageTimes as StageTimes,
)
from .context import (
    Topology as Topology,
)
from .context import (
    Variability as Variability,
)
from .context import (
    Workload as Workload,
)
from .context import (
    read_context as read_context,
)
from .measured_model import (
    model_from_measurements as model_from_measurements,
)
from .topology import (
    Efficiency as Efficiency,
)
