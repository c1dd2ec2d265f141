"""How properties are tested: on the same examples each time, however long they take."""

from hypothesis import HealthCheck, settings

CHECK = settings(derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
