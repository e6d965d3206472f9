"""halfstep in training loops that others own: one module for each host, imported by its name.

`halfstep.integrations.accelerate` has an Accelerator, `halfstep.integrations.transformers` a mixin for
Trainer, `halfstep.integrations.lightning` a plugin for Trainer and a Fabric. `import halfstep` imports none.
"""

from __future__ import annotations

from typing import Any

import halfstep as hs

FIRST_SCALE = 1024.0
"""Where a dynamic loss scale starts: 65,536 skips three or four of the first steps of a short run."""


def prepare(models: Any, optimizers: Any, how: dict[str, Any]) -> hs.Session:
    """`halfstep.prepare` with these arguments; a dynamic loss scale starts at `FIRST_SCALE`."""
    session = hs.prepare(models, optimizers, **how)
    if how["loss_scale"] in (None, "dynamic") and isinstance(session.loss_scale, hs.DynamicLossScale):
        session.loss_scale = hs.DynamicLossScale(init=FIRST_SCALE)
    return session
