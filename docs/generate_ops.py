"""Write docs/ops.md from the op tables: python docs/generate_ops.py."""

from pathlib import Path

from halfstep.policy.ops import markdown

if __name__ == "__main__":
    Path(__file__).with_name("ops.md").write_text(markdown(), encoding="utf-8")
