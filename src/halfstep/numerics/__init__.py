"""Evidence: what the numbers do, where they go wrong, why, and what would cure it.

`histogram` counts exponents, `watch` looks on while a model trains, `tape` records one step op by op, `trace`
names the first bad op and `cause` and `cures` explain it, `replayable` keeps steps ready for that, `lint`
finds mistakes without training. Nothing here changes a number that training uses (law 12,
ARCHITECTURE.md).
"""
