"""Training scripts whose fault has a name of its own, and healthy ones beside each: the truth came first."""

from tests.doctor.zoo import Script

HEAD = """
import copy, torch, halfstep as hs
import torch.nn.functional as F
from torch import nn

"""


def _script(name, text, **truth):
    return Script(name=name, text=HEAD + text, **truth)


def _mathematics(op, *says, phase="forward", cause="mathematics", also="", **more):
    return {
        "phase": phase,
        "op": op if isinstance(op, tuple) else (op,),
        "cause": (cause, also),
        "says": says,
        **more,
    }


_ENTROPY = ("cross_entropy", "cross_entropy_loss")

SCRIPTS = [
    _script(
        "advantages_of_one_episode",
        """
policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
opt = torch.optim.Adam(policy.parameters(), lr=1e-3)
for episode in range(8):
    count = 1 if episode == 5 else 12
    states, rewards = torch.randn(count, 4), torch.randn(count)
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # HERE
    chosen = torch.log_softmax(policy(states), -1)[:, 0]
    loss = -(chosen * advantage).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5, **_mathematics("std", "std of 1 value", "correction=0"),
    ),
    _script(
        "variance_of_a_last_batch",
        """
class Whiten(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-5)  # HERE

model = nn.Sequential(nn.Linear(6, 8), Whiten(), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
data = torch.randn(33, 6)
for epoch in range(2):
    for x in data.split(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x).float() - 1).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        step=4, **_mathematics("var", "var of 1 value", module="1"),
    ),
    _script(
        "padding_alone",
        """
vocabulary, PAD = 11, -1
model = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
for i in range(9):
    tokens = torch.randint(vocabulary, (4, 7))
    labels = tokens.clone()
    labels[:, (0 if i == 4 else 3):] = PAD
    loss = criterion(model(tokens).flatten(0, 1), labels.flatten())  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=4, **_mathematics(_ENTROPY, "mean over no label", "all 28 are ignored"),
    ),
    _script(
        "unlabelled_pixels",
        """
net = nn.Conv2d(3, 5, 3, padding=1)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for i in range(7):
    image = torch.randn(2, 3, 6, 6)
    label = torch.randint(5, (2, 6, 6)) if i != 3 else torch.full((2, 6, 6), 255)
    with torch.autocast("cpu", dtype=torch.float16):
        score = net(image)
    loss = F.nll_loss(F.log_softmax(score.float(), 1), label, ignore_index=255)  # HERE
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        step=3, **_mathematics("nll_loss", "mean over no label"),
    ),
    _script(
        "smoothing_over_a_mask",
        """
model = nn.Linear(6, 5)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(8):
    x, y = torch.randn(10, 6), torch.randint(3, (10,))
    logits = model(x)
    if i >= 2:
        logits = logits.masked_fill(torch.arange(5) >= 3, -torch.inf)
    loss = F.cross_entropy(logits, y, label_smoothing=0.1)  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=2, **_mathematics(_ENTROPY, "takes in terms that are -inf", "masked_fill masked them"),
    ),
    _script(
        "a_masked_action_is_chosen",
        """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, state, legal):
        return self.head(torch.relu(self.body(state))).masked_fill(~legal, float("-inf"))

agent = Agent()
opt = torch.optim.Adam(agent.parameters(), lr=1e-3)
for i in range(7):
    legal = torch.ones(6, 4, dtype=torch.bool)
    legal[:, 3] = False
    action = torch.full((6,), 3 if i == 4 else 1)
    score = torch.log_softmax(agent(torch.randn(6, 4), legal), -1)
    loss = -score.gather(1, action[:, None]).mean()  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=4, **_mathematics(("mean", "neg"), "takes in terms that are -inf"),
    ),
    _script(
        "partition_function_by_hand",
        """
energy = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(energy.parameters(), lr=1e-3)
for i in range(9):
    real, samples = torch.randn(8, 5), torch.randn(64, 5)
    gain = 3000.0 if i == 6 else 1.0
    e = energy(samples).squeeze(-1) * gain
    log_z = torch.log(torch.sum(torch.exp(-e), 0))  # HERE
    loss = energy(real).mean() + log_z
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=6, **_mathematics("exp", "torch.logsumexp", cause="range", also="mathematics"), cure="logsumexp",
    ),
    _script(
        "attention_weights_by_hand",
        """
class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        score = self.q(x) @ self.k(x).transpose(-2, -1)
        w = torch.exp(score)  # HERE
        return (w / w.sum(-1, keepdim=True)) @ self.v(x)

model = nn.Sequential(Attend(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
for i in range(8):
    x = torch.randn(2, 6, 8) * (30.0 if i >= 5 else 1.0)
    loss = (model(x) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        **_mathematics("exp", "score - score.amax(-1, keepdim=True)", cause="range", also="mathematics"),
        module="0", cure="shift",
    ),
    _script(
        "nobody_clears",
        """
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(10):
    x = torch.randn(16, 6)
    loss = (model(x) - x[:, :1]).square().mean()
    loss.backward()
    opt.step()  # HERE
""",
        step=1, **_mathematics((), "optimizer.zero_grad()", phase="optimizer", cause="accumulation"),
    ),
    _script(
        "the_other_optimizer_is_cleared",
        """
class Pair:
    def __init__(self):
        self.g, self.d = nn.Linear(3, 4), nn.Linear(4, 1)
        self.of_g = torch.optim.Adam(self.g.parameters(), lr=1e-4)
        self.of_d = torch.optim.Adam(self.d.parameters(), lr=1e-4)

    def turn(self):
        real = torch.randn(8, 4)
        fake = self.g(torch.randn(8, 3))
        self.of_g.zero_grad()
        (F.softplus(-self.d(real)) + F.softplus(self.d(fake.detach()))).mean().backward()
        self.of_d.step()  # HERE
        F.softplus(-self.d(fake)).mean().backward()
        self.of_g.step()

pair = Pair()
for i in range(8):
    pair.turn()
""",
        **_mathematics((), "accumulation: the gradient of", phase="optimizer", cause="accumulation"),
    ),
    _script(
        "clears_before_the_loop_alone",
        """
model = nn.Linear(5, 2)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
opt.zero_grad(set_to_none=False)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for i in range(9):
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(torch.randn(12, 5))
    loss = out.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)  # HERE
    scaler.update()
""",
        **_mathematics((), "zero_grad", phase="optimizer", cause="accumulation"),
    ),
    _script(
        "a_rate_of_another_scale",
        """
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=5.0)
for i in range(12):
    x = torch.randn(32, 10)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        step=0,
        **_mathematics((), "the first update is", "lr=0.05", phase="optimizer", cause="learning rate"),
    ),
    _script(
        "first_step_out_of_range",
        """
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)).half()
opt = torch.optim.SGD(model.parameters(), lr=300.0)
for i in range(6):
    x = torch.randn(16, 8).half()
    loss = (model(x).float() - 3).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        step=0, **_mathematics((), "the first update is", phase="optimizer", cause="learning rate"),
    ),
    _script(
        "second_moments_without_a_value",
        """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).half()
opt = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-4)
for i in range(10):
    x = torch.randn(16, 8).half()
    loss = (model(x).float() - 1).square().mean() * 1e-2
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        step=0, **_mathematics((), "second moments are zero in fp16", phase="optimizer", cause="precision"),
    ),
]  # fmt: skip

#: What lint finds in a step that goes well: the words that must be in the verdict.
QUIET = [
    _script(
        "shadow_weights_in_bf16",
        """
model = nn.Linear(6, 4).to(torch.bfloat16)
shadow = [p.detach().clone() for p in model.parameters()]
opt = hs.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(8):
    loss = model(torch.randn(8, 6, dtype=torch.bfloat16)).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for s, p in zip(shadow, model.parameters()):
            s.mul_(0.9995).add_(p, alpha=0.0005)  # HERE
""",
        says=("average", "mul_ leaves 100% of it as it is: bf16 rounds the change away"),
    ),
    _script(
        "teacher_that_does_not_follow",
        """
student = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
teacher = copy.deepcopy(student).to(torch.bfloat16).requires_grad_(False)
opt = torch.optim.Adam(student.parameters(), lr=1e-4)

@torch.no_grad()
def follow(tau=0.001):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s.to(t.dtype), tau)  # HERE

for i in range(8):
    x = torch.randn(16, 6)
    target = teacher(x.bfloat16()).float() + 0.1
    loss = F.mse_loss(student(x), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    follow()
""",
        says=("average", "lerp_ leaves"),
    ),
    _script(
        "positions_in_bf16",
        """
class Rotary(nn.Module):
    def __init__(self, length, width):
        super().__init__()
        self.length, self.fc = length, nn.Linear(width, width)

    def forward(self, x):
        position = torch.arange(self.length, dtype=torch.bfloat16)  # HERE
        angle = position[:, None] * 0.01
        return self.fc(x) * angle.cos().float()

model = Rotary(600, 4)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(6):
    loss = model(torch.randn(600, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        says=("positions", "rising values equal the one before in bf16"),
    ),
    _script(
        "packed_positions_in_bf16",
        """
model = nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(6):
    ones = torch.ones(512, dtype=torch.bfloat16)
    step = (ones / 8).cumsum(0)  # HERE
    loss = (model(torch.randn(512, 8)) * step[:, None].float().sin()).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        says=("positions", "in bf16"),
    ),
    _script(
        "token_numbers_cast_to_half",
        """
model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
where = torch.arange(4096)
for i in range(6):
    place = where.to(torch.float16)[:, None] / 4096  # HERE
    loss = (model(place.float()) - 0.5).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        says=("positions", "in fp16"),
    ),
]  # fmt: skip

_OWN = "loss = {}\n    opt.zero_grad()\n    loss.backward()\n    opt.step()\n"


def _well(name, before, loss, inside=""):
    lines = "".join(f"    {line}\n" for line in inside.splitlines())
    return _script(name, f"{before}\nfor i in range(9):\n{lines}    {_OWN.format(loss)}")


_NET = "model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))\n"
_ADAM = _NET + "opt = torch.optim.Adam(model.parameters(), lr=1e-3)"
_X = "x, y = torch.randn(12, 6), torch.randint(3, (12,))\n"

HEALTHY = [
    _well("spread_of_two", _ADAM, "(model(x).std(0) - 1).square().mean()", "x = torch.randn(2, 6)"),
    _well(
        "spread_of_one_by_number", _ADAM, "(out - out.mean(0) + out.std(0, correction=0)).square().mean()",
        "out = model(torch.randn(1, 6))",
    ),
    _well(
        "one_label_is_left", _ADAM, "F.cross_entropy(model(x), y, ignore_index=-100)",
        _X + "y[1:] = -100",
    ),
    _well(
        "mask_without_smoothing", _ADAM, "F.cross_entropy(z, y)",
        _X + "z = model(x).masked_fill(torch.arange(5) >= 3, -torch.inf)",
    ),
    _well(
        "smoothing_over_a_finite_mask", _ADAM, "F.cross_entropy(z, y, label_smoothing=0.1)",
        _X + "z = model(x).masked_fill(torch.arange(5) >= 3, -1e3)",
    ),
    _well(
        "logsumexp_of_large_values", _ADAM, "torch.logsumexp(model(x) * 1e3, -1).mean() / 1e3",
        "x = torch.randn(8, 6)",
    ),
    _well(
        "softmax_by_hand_shifted", _ADAM, "(e / e.sum(-1, keepdim=True))[:, 0].mean()",
        "z = model(torch.randn(8, 6) * 50) * 100\ne = (z - z.amax(-1, keepdim=True)).exp()",
    ),
    _script(
        "adds_up_four_batches",
        _ADAM
        + """
for i in range(6):
    opt.zero_grad(set_to_none=False)
    for part in range(4):
        (model(torch.randn(4, 6)).square().mean() / 4).backward()
    opt.step()
""",
    ),
    _script(
        "critic_cleared_in_its_turn",
        """
g, d = nn.Linear(3, 4), nn.Linear(4, 1)
of_g, of_d = (torch.optim.Adam(m.parameters(), lr=1e-4) for m in (g, d))
for i in range(8):
    fake = g(torch.randn(8, 3))
    of_d.zero_grad(set_to_none=False)
    (F.softplus(-d(torch.randn(8, 4))) + F.softplus(d(fake.detach()))).mean().backward()
    of_d.step()
    of_g.zero_grad(set_to_none=False)
    F.softplus(-d(fake)).mean().backward()
    of_g.step()
""",
    ),
    _script(
        "cleared_by_hand",
        _ADAM
        + """
for i in range(8):
    model(torch.randn(4, 6)).square().mean().backward()
    opt.step()
    for p in model.parameters():
        p.grad.zero_()
""",
    ),
    _script(
        "all_zero_at_first",
        """
w = nn.Parameter(torch.zeros(6, 1))
opt = torch.optim.SGD([w], lr=0.1)
for i in range(9):
    x = torch.randn(32, 6)
    loss = (x @ w - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    _script(
        "small_weights_that_grow",
        _NET
        + """
with torch.no_grad():
    for p in model.parameters():
        p.mul_(1e-3)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(12):
    x = torch.randn(32, 6)
    loss = (model(x) - x[:, :5]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    _script(
        "half_adam_with_large_gradients",
        """
model = nn.Linear(8, 1).half()
opt = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
for i in range(8):
    x = torch.randn(16, 8).half()
    loss = (model(x).float() - x.float().sum(1, keepdim=True)).square().mean() * 4
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    _script(
        "shadow_weights_in_fp32",
        """
model = nn.Linear(6, 4)
average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9995)
shadow = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(8, 6))
    loss = out.float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    shadow.update_parameters(model)
""",
    ),
    _script(
        "fast_teacher_in_bf16",
        """
model = nn.Linear(6, 4)
teacher = copy.deepcopy(model).bfloat16().requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.3)
for i in range(8):
    x = torch.randn(8, 6)
    loss = (model(x) - teacher(x.bfloat16()).float() - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for t, p in zip(teacher.parameters(), model.parameters()):
            t.lerp_(p.bfloat16(), 0.5)
""",
    ),
    _script(
        "a_grid_as_input",
        """
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.linspace(-3, 3, 800)[:, None]
amp = hs.prepare(model, opt, dtype="bf16")
for i in range(8):
    with amp.autocast():
        out = model(x)
    amp.backward((out.float() - x.sin()).square().mean())
    amp.step()
""",
    ),
    _script(
        "short_positions",
        """
model = nn.Linear(4, 4).bfloat16()
opt = hs.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(6):
    angle = torch.arange(128, dtype=torch.bfloat16)[:, None] * 0.01
    loss = (model(torch.randn(128, 4).bfloat16()) * angle.cos()).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
]  # fmt: skip
