"""Load `ackbone.yaml`, the environment and the defaults into one frozen `Config`."""

from __future__ import annotations

from .load import load_config as load_config
from .load import load_queue_trigger_config as load_queue_trigger_config
from .queues import Queue as Queue
from .queues import Retry as Retry
from .settings import Adapter as Adapter
from .settings import Breaker as Breaker
from .settings import Config as Config
from .settings import Ledger as Ledger
from .settings import Log as Log
from .settings import Metrics as Metrics
from .settings import Retention as Retention
from .settings import Setting as Setting
from .settings import Trigger as Trigger
from .settings import TriggerMetrics as TriggerMetrics
from .settings import Worker as Worker
from .tasks import Tasks as Tasks
