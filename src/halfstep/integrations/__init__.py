"""halfstep in training loops that others own: one module for each host, imported by its name.

`halfstep.integrations.accelerate` has an Accelerator, `halfstep.integrations.transformers` a mixin for
Trainer. `import halfstep` imports neither.
"""
