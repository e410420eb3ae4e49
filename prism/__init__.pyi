from . import (
    attribution as attribution,
)
from . import (
    base as base,
)
from . import (
    chrome_trace as chrome_trace,
)
from . import (
    cli as cli,
)
from . import (
    cluster as cluster,
)
from . import (
    context as context,
)
from . import (
    measure as measure,
)
from . import (
    model as model,
)
from . import (
    plots as plots,
)
from . import (
    study as study,
)
from . import (
    traces as traces,
)
from . import (
    validation as validation,
)
from . import (
    whatif as whatif,
)
from .attribution import (
    ablate as ablate,
)
from .base.stats import (
    guarantee as guarantee,
)
from .base.stats import (
    min_draws as min_draws,
)
from .cluster import (
    Checkpoint as Checkpoint,
)
from .cluster import (
    Cluster as Cluster,
)
from .cluster import (
    read_jobs as read_jobs,
)
from .cluster import (
    run_cluster as run_cluster,
)
from .context import (
    Context as Context,
)
from .context import (
    Link as Link,
)
from .context import (
    Parallelism as Parallelism,
)
from .context import (
    Topology as Topology,
)
from .context import (
    Workload as Workload,
)
from .context import (
    model_from_context as model_from_context,
)
from .measure.collectives import (
    read_collectives as read_collectives,
)
from .measure.fleet import (
    read_fleet as read_fleet,
)
from .measure.fleet import (
    variability as variability,
)
from .measure.telemetry import (
    read_telemetry as read_telemetry,
)
from .model import (
    Coupling as Coupling,
)
from .model import (
    DagBuilder as DagBuilder,
)
from .model import (
    Loading as Loading,
)
from .model import (
    PoolKey as PoolKey,
)
from .model import (
    Signature as Signature,
)
from .model import (
    StepModel as StepModel,
)
from .model import (
    WorkloadDAG as WorkloadDAG,
)
from .model import (
    read_model as read_model,
)
from .model import (
    simulate as simulate,
)
from .model import (
    write_model as write_model,
)
from .model.pools import (
    Bimodal as Bimodal,
)
from .model.pools import (
    DurationPool as DurationPool,
)
from .model.pools import (
    Empirical as Empirical,
)
from .model.pools import (
    Fixed as Fixed,
)
from .model.pools import (
    Gamma as Gamma,
)
from .model.pools import (
    HeavyTail as HeavyTail,
)
from .model.pools import (
    LogNormal as LogNormal,
)
from .model.pools import (
    MaxOf as MaxOf,
)
from .model.pools import (
    Normal as Normal,
)
from .model.pools import (
    Scaled as Scaled,
)
from .model.pools import (
    Shifted as Shifted,
)
from .traces import (
    breakdown as breakdown,
)
from .traces import (
    model_from_trace as model_from_trace,
)
from .traces import (
    read_trace as read_trace,
)
from .validation import (
    compare as compare,
)
from .validation import (
    require as require,
)
from .validation import (
    validate as validate,
)
from .whatif import (
    Compose as Compose,
)
from .whatif import (
    CrossDatacenter as CrossDatacenter,
)
from .whatif import (
    Frozen as Frozen,
)
from .whatif import (
    HotGpu as HotGpu,
)
from .whatif import (
    HotNode as HotNode,
)
from .whatif import (
    NodeSpeeds as NodeSpeeds,
)
from .whatif import (
    SlowLink as SlowLink,
)
from .whatif import (
    optimise_placement as optimise_placement,
)
from .whatif import (
    sweep as sweep,
)

__version__: str
