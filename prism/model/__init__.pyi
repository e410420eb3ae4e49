from . import (
    engine as engine,
)
from . import (
    pools as pools,
)
from . import (
    schedules as schedules,
)
from .coupling import (
    LEVELS as LEVELS,
)
from .coupling import (
    Coupling as Coupling,
)
from .coupling import (
    Loading as Loading,
)
from .dag import (
    WorkloadDAG as WorkloadDAG,
)
from .dag_builder import (
    DagBuilder as DagBuilder,
)
from .engine.montecarlo import (
    propagate as propagate,
)
from .engine.montecarlo import (
    sample_durations as sample_durations,
)
from .engine.montecarlo import (
    simulate as simulate,
)
from .model_file import (
    read_model as read_model,
)
from .model_file import (
    write_model as write_model,
)
from .signature import (
    ROLES as ROLES,
)
from .signature import (
    Category as Category,
)
from .signature import (
    PoolKey as PoolKey,
)
from .signature import (
    Signature as Signature,
)
from .step_model import (
    StepModel as StepModel,
)
