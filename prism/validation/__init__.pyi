from .comparison import (
    ValidationError as ValidationError,
)
from .comparison import (
    compare as compare,
)
from .comparison import (
    quantile_quantile as quantile_quantile,
)
from .comparison import (
    read_step_times as read_step_times,
)
from .comparison import (
    require as require,
)
from .cross_validation import (
    cross_validate as cross_validate,
)
from .cross_validation import (
    validate as validate,
)
from .cross_validation import (
    validate_each as validate_each,
)
from .refits import (
    Plan as Plan,
)
from .refits import (
    guarantee_with_fit as guarantee_with_fit,
)
from .refits import (
    measurement_plan as measurement_plan,
)
from .refits import (
    refit_resamples as refit_resamples,
)
