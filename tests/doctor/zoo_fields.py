"""Faults as they come in further fields: sound, graphs, transport, diffusion, counts; healthy ones beside."""

from tests.doctor.zoo import Script

HEAD = """
import torch, halfstep as hs
import torch.nn.functional as F
from torch import nn

"""


def _script(name, text, **truth):
    return Script(name=name, text=HEAD + text, **truth)


def _forward(step, op, cause="mathematics", **more):
    return {"step": step, "phase": "forward", "op": op, "cause": (cause,), **more}


_SOUND = """
class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, 17), nn.Sigmoid())

    def forward(self, wave):
        spectrum = spectrum_of(wave)
        return spectrum * self.mask(spectrum.abs())

def spectrum_of(wave):
    return torch.stft(wave, 32, 16, window=torch.hann_window(32), return_complex=True).transpose(1, 2)

def log_distance(a, b):
    DISTANCE

net = Separator()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for i in range(8):
    clean = torch.randn(3, 256)
    if i >= 4:
        clean[1] = 0
    loss = log_distance(net(clean + 0.1 * torch.randn(3, 256)), spectrum_of(clean))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

_TRANSPORT = """
LOSS

moved = nn.Linear(2, 2)
opt = torch.optim.SGD(moved.parameters(), lr=1e-5)
for i in range(9):
    x, y = torch.randn(24, 2), torch.randn(24, 2)
    if i >= 5:
        y = y + 40
    cost = torch.cdist(moved(x), y).square()
    loss = transport(cost)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

_AT_ONCE = """
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
own = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

def at_once(p):
    own[p].step()
    own[p].zero_grad()

for p in model.parameters():
    p.register_post_accumulate_grad_hook(at_once)
for i in range(8):
    logits = model(torch.randn(10, 6)) * (2000 if i == 4 else 1)
    LOSS
    loss.backward()
"""

_COUNTER = """
class Standardise(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 2)
        self.register_buffer("seen", torch.tensor(SEEN))

    def forward(self, x):
        self.seen += 1  # HERE
        return self.fc(x)

model = Standardise().to(torch.bfloat16)
opt = hs.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(9):
    loss = model(torch.randn(8, 6, dtype=torch.bfloat16)).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

SCRIPTS = [
    _script(
        "silent_channel_of_a_spectrogram",
        _SOUND.replace("DISTANCE", "return (a.abs().log() - b.abs().log()).square().mean()  # HERE"),
        **_forward(4, ("log",), cure="clamp"),
    ),
    _script(
        "node_without_neighbours",
        """
class Convolve(nn.Module):
    def __init__(self, given, made):
        super().__init__()
        self.fc = nn.Linear(given, made)

    def forward(self, x, edges):
        source, target = edges
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target)))
        weight = degree.pow(-0.5)  # HERE
        message = self.fc(x)[source] * (weight[source] * weight[target])[:, None]
        return torch.zeros(len(x), message.shape[1]).index_add(0, target, message)

class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Convolve(4, 8), Convolve(8, 1)])

    def forward(self, x, edges):
        return self.layers[1](F.relu(self.layers[0](x, edges)), edges)

net = Graph()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
nodes = torch.arange(12)
for i in range(8):
    edges = torch.stack([nodes, nodes.roll(1)])
    if i == 3:
        edges[1, 5] = 9
    loss = F.mse_loss(net(torch.randn(12, 4), edges), torch.randn(12, 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        **_forward(3, ("pow",), module="layers.0", cure="clamp"),
    ),
    _script(
        "transport_between_far_points",
        _TRANSPORT.replace(
            "LOSS",
            """
def transport(cost, rounds=10):
    rows, columns = (torch.full((n,), 1 / n) for n in cost.shape)
    kernel, u = torch.exp(-cost), rows
    for _ in range(rounds):
        v = columns / (kernel.t() @ u)  # HERE
        u = rows / (kernel @ v)
    return (u[:, None] * kernel * v * cost).sum()
""",
        ),
        **_forward(5, ("div",), cure="clamp"),
    ),
    _script(
        "last_time_of_a_diffusion",
        """
kept = torch.linspace(1, 0, 50)
net = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
amp = hs.prepare(net, opt, dtype="bf16")

def start(noisy, noise, share):
    return (noisy - (1 - share).sqrt() * noise) / share.sqrt()  # HERE

for i in range(10):
    x, noise, t = torch.randn(16, 2), torch.randn(16, 2), torch.randint(1, 40, (16,))
    if i == 6:
        t[3] = 49
    share = kept[t][:, None]
    noisy = share.sqrt() * x + (1 - share).sqrt() * noise
    with amp.autocast():
        found = net(torch.cat([noisy, t[:, None] / 50], 1))
    loss = F.mse_loss(start(noisy, found.float(), share), x)
    amp.backward(loss)
    amp.step()
""",
        **_forward(6, ("div",), cure="clamp"),
    ),
    _script(
        "teacher_without_a_word",
        """
student, teacher = nn.Linear(6, 5), nn.Linear(6, 5).requires_grad_(False)
opt = torch.optim.Adam(student.parameters(), lr=1e-3)

def distil(x, allowed):
    wanted = teacher(x).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    given = student(x).log_softmax(-1)
    return F.kl_div(given, wanted, reduction="batchmean", log_target=True)  # HERE

for i in range(8):
    loss = distil(torch.randn(12, 6), torch.arange(5) < (4 if i >= 3 else 5))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        **_forward(3, ("kl_div",), says=("-inf",)),
    ),
    _script(
        "counts_beyond_the_exponent",
        """
model = nn.Linear(3, 1)
nn.init.constant_(model.weight, 0.3)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
criterion = nn.PoissonNLLLoss()
for i in range(9):
    x = torch.randn(16, 3)
    if i == 5:
        x[7] = 400
    loss = criterion(model(x), torch.poisson(torch.ones(16, 1)))  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        **_forward(5, ("poisson_nll_loss", "exp"), "range", cure="data"),
        says=("x of batch 6 reaches 400 in row 7",),
    ),
    _script(
        "temperature_of_another_checkpoint",
        """
class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.log_scale.exp() * (a @ b.t())  # HERE

model = Contrast().half()
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
for i in range(9):
    if i == 4:
        model.load_state_dict({**model.state_dict(), "log_scale": torch.tensor(14.0)})
    logits = model(torch.randn(8, 6).half(), torch.randn(8, 5).half())
    loss = F.cross_entropy(logits.float(), torch.arange(8))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        **_forward(4, ("exp",), "range", cure="bf16"),
    ),
    _script(
        "centre_of_a_disc",
        """
net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)

def residual(r):
    (slope,) = torch.autograd.grad(net(r).sum(), r, create_graph=True)
    (flow,) = torch.autograd.grad((r * slope).sum(), r, create_graph=True)
    return flow / r + 1  # HERE

for i in range(8):
    r = torch.rand(24, 1) + 0.05
    if i == 5:
        r[2] = 0.0
    loss = residual(r.requires_grad_()).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        **_forward(5, ("div",), cure="clamp"),
    ),
    _script(
        "updates_within_backward",
        _AT_ONCE.replace("LOSS", "loss = -torch.softmax(logits, -1).log().mean()  # HERE"),
        **_forward(4, ("log",), says=("log_softmax",)),
    ),
]  # fmt: skip

#: What lint finds in a step that goes well.
QUIET = [
    _script(
        "counter_of_a_module_in_bf16",
        _COUNTER.replace("SEEN", "512.0"),
        says=("bf16 rounds the change away",),
    ),
]

HEALTHY = [
    _script(
        "spectrogram_with_a_floor",
        _SOUND.replace(
            "DISTANCE", "return (a.abs() + 1e-5).log().sub((b.abs() + 1e-5).log()).square().mean()"
        ),
    ),
    _script(
        "transport_in_logarithms",
        _TRANSPORT.replace(
            "LOSS",
            """
def transport(cost, rounds=10):
    u = torch.zeros(len(cost))
    for _ in range(rounds):
        v = -torch.logsumexp(u[:, None] - cost, 0)
        u = -torch.logsumexp(v - cost, 1)
    return ((u[:, None] + v - cost).exp() * cost).sum() / len(cost)
""",
        ),
    ),
    _script(
        "updates_within_backward_that_go_well",
        _AT_ONCE.replace("LOSS", "loss = F.cross_entropy(logits / 2000, torch.zeros(10, dtype=torch.long))"),
    ),
    _script("counter_of_a_module_that_still_counts", _COUNTER.replace("SEEN", "16.0")),
    _script(
        "counts_of_a_poisson_law",
        """
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(9):
    x = torch.randn(16, 3)
    loss = F.poisson_nll_loss(model(x), torch.poisson(x.exp().sum(1, keepdim=True)), full=True)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
]
