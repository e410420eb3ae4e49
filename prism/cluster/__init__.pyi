from .comparing import (
    compare_estimates as compare_estimates,
)
from .comparing import (
    mean_jct_of_first as mean_jct_of_first,
)
from .comparing import (
    ratios as ratios,
)
from .jobs import (
    JobsError as JobsError,
)
from .jobs import (
    read_jobs as read_jobs,
)
from .jobs import (
    select_jobs as select_jobs,
)
from .jobs import (
    with_cv as with_cv,
)
from .machine import (
    Checkpoint as Checkpoint,
)
from .machine import (
    Cluster as Cluster,
)
from .machine import (
    Speed as Speed,
)
from .machine import (
    arena_cluster as arena_cluster,
)
from .overrun import (
    OVERRUNS as OVERRUNS,
)
from .overrun import (
    Overrun as Overrun,
)
from .policies import (
    POLICIES as POLICIES,
)
from .policies import (
    Queue as Queue,
)
from .policies import (
    pack as pack,
)
from .runtimes import (
    ESTIMATES as ESTIMATES,
)
from .runtimes import (
    Flat as Flat,
)
from .runtimes import (
    Known as Known,
)
from .runtimes import (
    Quantile as Quantile,
)
from .simulator import (
    offered_load as offered_load,
)
from .simulator import (
    run_cluster as run_cluster,
)
from .speeds import (
    speed_from_context as speed_from_context,
)
