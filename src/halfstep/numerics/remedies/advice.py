"""What only a person can change: advice with code to begin from, which is neither tried nor written."""

from halfstep.numerics.remedies.base import Cure, Evidence, Remedy, where
from halfstep.numerics.remedies.terms import terms_of
from halfstep.numerics.tape import Node, is_finite


class RowOfWeight(Remedy):
    """Bring back the row of a parameter that is far larger than the others."""

    cases = ("range",)

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Name the parameter."""
        weight = evidence.cause.weight
        text = f"bring the row of {weight} back; look at what wrote it (learning rate, sparse updates)"
        return [Cure("advice", text, f"{weight}.data.clamp_(-k, k)")] if weight else []


class ByHand(Remedy):
    """Say what to do about a cause that no change to an op ends."""

    cases = ("learning rate", "beyond", "advice", "data", "weights", "machine", "rank", "unknown")

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Advise by the kind of cause."""
        node, cause, kind = evidence.node, evidence.cause, "advice"
        if evidence.case == "learning rate":
            text, code = "check the schedule: what it divides by, and its range", "math.isfinite(lr)"
        elif evidence.case == "beyond":
            code = terms_of(evidence.parts, node.location.in_region).clip
            text = (
                f"values have left the range of {cause.format} itself: look for divergence (learning rate, "
            )
            text += "missing normalisation) or unscaled data"
            if node.phase == "optimizer":
                text = (
                    "the values in the optimizer's state left the range: clip gradients before they get there"
                )
        elif cause.advice is not None:
            text, code = cause.advice[0] + where(node.location), cause.advice[1]
        elif evidence.case == "data":
            kind, text = "data", "drop such batches, or clean them where they are loaded"
            code = (
                f"torch.isfinite({next((n for n, t in node.names.items() if not is_finite(t)), 'x')}).all()"
            )
        elif evidence.case == "weights":
            text, code = (
                "look at how it was made, loaded or updated, or go back to a checkpoint before that",
                "",
            )
        else:
            text = "run the step again; if it stays finite, check the hardware and "
            text += "kernels that write without order"
            code = "torch.use_deterministic_algorithms(True)"
        return [Cure(kind, text, code)]


def unmask(node: Node, mask: Node) -> list[Cure]:
    """Return the cure where an op reads the -inf that a mask wrote."""
    text = f"leave the masked terms out of {node.op}{where(node.location)}, or fill them with a finite number"
    return [Cure("advice", f"{text}{where(mask.location)}", "x.masked_fill(mask, -1e4)")]
