"""Programs in odd dresses, their truth written down before they were first examined."""

from tests.doctor.zoo import Script

SCRIPTS = [
    Script(
        name="mean_teacher",
        text="""
import copy
import torch
from torch import nn

student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
teacher = copy.deepcopy(student).requires_grad_(False)
opt = torch.optim.SGD(student.parameters(), lr=0.05)

def follow(step):
    rate = torch.tensor(1.0) / (step - 4.0) ** 2  # HERE
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.lerp_(s, rate.clamp(max=0.1) if step != 4 else rate)

for i in range(12):
    x = torch.randn(16, 6)
    with torch.no_grad():
        target = teacher(x)
    loss = (student(x) - target).square().mean() + student(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    follow(i)
""",
        step=-1,
        phase="forward",
        module="",
        op=("div", "reciprocal"),
        cause=("mathematics",),
    ),
    Script(
        name="reentrant_checkpoint",
        text="""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)

    def forward(self, x):
        h = self.lin(x)
        centred = h - h.mean(-1, keepdim=True)
        size = centred.pow(2).sum(-1, keepdim=True).sqrt()  # HERE
        return x + centred * size

class Tower(nn.Module):
    def __init__(self, d=6, depth=3):
        super().__init__()
        self.stem = nn.Linear(d, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

net = Tower()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for i in range(8):
    if i == 5:
        with torch.no_grad():
            net.blocks[1].lin.weight.zero_()
            net.blocks[1].lin.bias.fill_(0.25)
    loss = net(torch.randn(7, 6)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        phase="backward",
        module="blocks.1",
        op=("sqrt",),
        cause=("mathematics",),
        cure="clamp",
    ),
    Script(
        name="empty_micro_batch",
        text="""
import torch
import halfstep as hs
from torch import nn

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(20, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, words):
        return self.head(self.embed(words)).squeeze(-1)

def masked_mean(errors, mask):
    return (errors * mask).sum() / mask.sum()  # HERE

model = Counter()
amp = hs.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level="O1", dtype="bf16")
for i in range(7):
    for micro in range(4):
        words = torch.randint(0, 20, (5, 3))
        mask = torch.ones(5)
        mask[3:] = 0
        if (i, micro) == (4, 2):
            mask[:] = 0
        with amp.autocast():
            errors = (model(words).float() - 1).abs()
        amp.backward(masked_mean(errors, mask) / 4)
    amp.step(clip_norm=1.0)
""",
        step=4,
        phase="forward",
        module="",
        op=("div",),
        cause=("mathematics",),
        cure="clamp",
    ),
    Script(
        name="apex_with_a_large_scale",
        text="""
import torch
from torch import nn
from halfstep.compat.apex import amp

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=1024.0, verbosity=0)
for i in range(8):
    x = torch.randn(4, 8)
    y = torch.zeros(4, 1) if i != 5 else torch.full((4, 1), 3e3)
    optimizer.zero_grad()
    loss = (model(x).float() - y).square().sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
""",
        step=5,
        phase="backward",
        op=("cast", "linear"),
        cause=("range",),
        cure="loss_scale",
    ),
    Script(
        name="mindspore_cell",
        text="""
import numpy as np
import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import nn, ops, value_and_grad

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 6)
        self.out = nn.Dense(6, 1)

    def construct(self, x):
        h = ops.relu(self.dense(x)).sum(-1, keepdims=True) * ms.Tensor(np.ones((1, 6), np.float32))
        return self.out(ops.log(h))  # HERE

ms.set_seed(0)
net = Net()
optimizer = nn.SGD(net.trainable_params(), 1e-3)
rng = np.random.default_rng(0)

def forward(x):
    return (net(x) ** 2).mean()

grad = value_and_grad(forward, None, net.trainable_params())
net.set_train()
for i in range(8):
    data = np.abs(rng.standard_normal((5, 4))).astype(np.float32)
    if i == 4:
        net.dense.bias.set_data(ms.Tensor(np.full(6, -100, np.float32)))
    loss, grads = grad(ms.Tensor(data))
    optimizer(grads)
""",
        step=4,
        phase="forward",
        op=("log",),
        cause=("mathematics",),
    ),
    Script(
        name="compiled_loss",
        text="""
import torch
from torch import nn

model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 4))

@torch.compile(backend="aot_eager")
def focal(logits, target, gamma: float = 2.0):
    p = torch.softmax(logits, -1).gather(-1, target[:, None]).squeeze(-1)
    return -((1 - p) ** gamma * torch.log(p)).mean()  # HERE

opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(7):
    x = torch.randn(12, 5)
    if i == 4:
        x[3] = 1e4
    opt.zero_grad()
    logits = model(x)
    focal(logits, logits.argmin(-1)).backward()
    opt.step()
""",
        step=4,
        phase="forward",
        op=("log",),
        cause=("mathematics",),
    ),
    Script(
        name="callable_class_without_modules",
        text="""
import torch

class Regression:
    def __init__(self, width):
        g = torch.Generator().manual_seed(1)
        self.w = torch.randn(3, width, generator=g).requires_grad_()
        self.v = torch.randn(width, generator=g).requires_grad_()

    def __call__(self, x):
        return torch.relu(x @ self.w) @ self.v

class RootLoss:
    def __call__(self, out, y):
        return ((out - y) ** 2).mean() + 0.01 * (out - y + 9).pow(0.5).mean()  # HERE

predict, criterion = Regression(5), RootLoss()
opts = [torch.optim.SGD([predict.w], lr=1e-3), torch.optim.Adam([predict.v], lr=1e-3)]
for i in range(9):
    x = torch.rand(6, 3) * 0.2
    y = predict(x).detach() + (12.0 if i == 6 else 0.0)
    loss = criterion(predict(x), y)
    for o in opts:
        o.zero_grad()
    loss.backward()
    for o in opts:
        o.step()
""",
        step=6,
        phase="forward",
        op=("pow",),
        cause=("mathematics",),
    ),
    Script(
        name="polynomial_schedule_past_its_end",
        text="""
import numpy as np
import torch
from torch import nn

class Poly:
    def __init__(self, opt, total):
        self.opt, self.total, self.count = opt, total, 0
        self.base = [g["lr"] for g in opt.param_groups]

    def step(self):
        self.count += 1
        with np.errstate(invalid="ignore"):
            factor = np.power(1 - self.count / self.total, 0.9)
        for group, base in zip(self.opt.param_groups, self.base):
            group["lr"] = float(base * factor)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "lr": 0.1}]
opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
schedule = Poly(opt, 6)
for i in range(11):
    loss = model(torch.randn(8, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
    schedule.step()
""",
        step=7,
        phase="optimizer",
        cause=("learning rate",),
        says=("nan",),
    ),
    Script(
        name="temperature_of_one_of_two_optimizers",
        text="""
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 8)

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=-1)

class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(0.0))

    def forward(self, a, b):
        return a @ b.T * self.log_temperature.exp()  # HERE

left, right, head = Encoder(), Encoder(), Contrast()
opt = torch.optim.AdamW([*left.parameters(), *right.parameters()], lr=1e-3)
opt_t = torch.optim.SGD(head.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for i in range(9):
    if i == 5:
        head.log_temperature.data.fill_(14.0)
    with torch.autocast("cpu", dtype=torch.float16):
        x = torch.randn(8, 6)
        logits = head(left(x), right(x + 0.1 * torch.randn(8, 6))).half()
        loss = nn.functional.cross_entropy(logits.float().clamp(-1e3, 1e3), torch.arange(8))
        loss = loss + (logits * 0).float().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(left.parameters(), 1.0)
    scaler.step(opt)
    scaler.step(opt_t)
    scaler.update()
    opt.zero_grad()
    opt_t.zero_grad()
""",
        step=5,
        phase="forward",
        module="Contrast",
        cause=("range",),
        says=("range",),
    ),
    Script(
        name="gumbel_noise_between_validations",
        text="""
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.score = nn.Linear(d, 3)

    def noise(self, shape):
        u = torch.rand(shape)
        if self.training and self.calls == 5:
            u.view(-1)[4] = 0.0
        return -torch.log(-torch.log(u))  # HERE

    def forward(self, x):
        s = self.score(x)
        if self.training:
            s = (s + self.noise(s.shape)) / 0.5
            return torch.softmax(s - s.min(-1, keepdim=True).values, -1)
        return torch.softmax(s, -1)

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate(4)
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x):
        return sum(g * e(x) for g, e in zip(self.gate(x).split(1, -1), self.experts))

model = Mixture()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(9):
    model.train()
    model.gate.calls = i
    loss = (model(torch.randn(6, 4)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 3 == 2:
        model.eval()
        with torch.no_grad():
            model(torch.randn(32, 4)).square().mean().item()
""",
        step=5,
        phase="forward",
        module="gate",
        cause=("mathematics",),
    ),
    Script(
        name="scan_in_half",
        text="""
import torch
from torch import nn

class Scan(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.rate = nn.Linear(d, d)
        self.into = nn.Linear(d, d)

    def forward(self, x):
        keep = torch.sigmoid(self.rate(x)).clamp(0.5, 0.6)
        decay = torch.cumprod(keep, 1)
        return decay * torch.cumsum(self.into(x) / decay, 1)  # HERE

class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.scan = Scan(4)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.scan(x)[:, -1])

rnn = Rnn().half()
opt = torch.optim.SGD(rnn.parameters(), lr=1e-4)
for i in range(8):
    x = torch.randn(3, 60 if i == 5 else 6, 4).half()
    loss = rnn(x).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        phase="forward",
        module="scan",
        op=("div",),
        cause=("precision", "range"),
    ),
    Script(
        name="saturated_discriminator",
        text="""
import torch
from torch import nn

def block(i, o):
    return nn.Sequential(nn.Linear(i, 16), nn.LeakyReLU(0.2), nn.Linear(16, o))

class GAN:
    def __init__(self):
        self.g, self.d = block(2, 3), block(3, 1)
        self.og = torch.optim.Adam(self.g.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.od = torch.optim.Adam(self.d.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def critic(self, real, fake):
        p, q = torch.sigmoid(self.d(real)), torch.sigmoid(self.d(fake.detach()))
        loss = -torch.log(p).mean() - torch.log1p(-q).mean()
        self.od.zero_grad()
        loss.backward()
        self.od.step()

    def forger(self, fake):
        q = torch.sigmoid(self.d(fake))
        loss = torch.log(1 - q).mean()  # HERE
        self.og.zero_grad()
        loss.backward()
        self.og.step()

gan = GAN()
for i in range(8):
    real, z = torch.randn(8, 3), torch.randn(8, 2)
    gan.critic(real, gan.g(z))
    if i == 5:
        with torch.no_grad():
            gan.d[2].bias.fill_(200.0)
    gan.forger(gan.g(z))
""",
        step=5,
        phase="forward",
        op=("log",),
        cause=("mathematics", "precision"),
    ),
    Script(
        name="function_that_narrows_in_backward",
        text="""
import torch
from torch import nn

class Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        g = (grad * 256).half()  # HERE
        return (g.float() @ w) / 256, (g.t().float() @ x) / 256

class Layer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i) / i**0.5)

    def forward(self, x):
        return Quantised.apply(x, self.weight)

net = nn.Sequential(Layer(4, 6), nn.ReLU(), Layer(6, 2))
opt = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
for i in range(8):
    out = net(torch.randn(9, 4))
    loss = out.sum() * (1e4 if i == 6 else 1.0)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=6,
        phase="backward",
        module="2",
        op=("cast", "half"),
        cause=("range",),
    ),
    Script(
        name="hook_that_normalises",
        text="""
import torch
from torch import nn

class Freezing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x, use):
        return self.b(self.a(x) * use)

net = Freezing()
for p in net.parameters():
    p.register_hook(lambda g: g / g.norm())  # HERE
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for i in range(8):
    opt.zero_grad()
    net(torch.randn(6, 5), 0.0 if i == 4 else 1.0).square().mean().backward()
    opt.step()
""",
        step=4,
        phase="backward",
        op=("div",),
        cause=("mathematics",),
    ),
    Script(
        name="standardised_by_its_own_spread",
        text="""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Windows(Dataset):
    def __init__(self):
        self.series = torch.randn(400, generator=torch.Generator().manual_seed(4))
        self.series[200:216] = 1.5

    def __len__(self):
        return 40

    def __getitem__(self, i):
        w = self.series[10 * i : 10 * i + 9]
        w = (w - w.mean()) / w.std()  # HERE
        return w[:8], w[8:]

net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for x, y in DataLoader(Windows(), batch_size=4):
    loss = (net(x) - y).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        phase="forward",
        op=("div",),
        cause=("mathematics",),
    ),
    Script(
        name="buffer_out_of_range_by_half",
        text="""
import torch
from torch import nn

class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.size = nn.Parameter(torch.full((4,), 1e5))

    def forward(self, x):
        return self.fc(x) / self.size

model = nn.Sequential(Positions(), nn.Linear(4, 1)).half()  # HERE
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(6):
    loss = (model(torch.randn(8, 4).half()).float() - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=0,
        phase="prepare",
        module="0",
        op=("cast",),
        cause=("range",),
        says=("0.size",),
    ),
]

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nimport halfstep as hs\n"

HEALTHY = [
    Script(
        "averaged_and_evaluated",
        HEAD
        + """
m = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))
ema = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
o = torch.optim.AdamW(m.parameters(), lr=1e-3)
best = torch.tensor(float("inf"))
for i in range(9):
    loss = F.cross_entropy(m(torch.randn(8, 6)), torch.randint(0, 5, (8,)))
    o.zero_grad(); loss.backward(); o.step(); ema.update_parameters(m)
    if i % 3 == 2:
        ema.eval()
        with torch.no_grad():
            s = ema(torch.randn(16, 6))
            s = s.masked_fill(s < s.topk(2, -1).values[:, -1:], float("-inf"))
            best = torch.minimum(best, s.softmax(-1).amax())
        ema.train()
""",
    ),
    Script(
        "forward_algorithm",
        HEAD
        + """
class Crf(nn.Module):
    def __init__(self, n=4):
        super().__init__(); self.emit = nn.Linear(6, n); self.trans = nn.Parameter(torch.randn(n, n))
    def forward(self, x):
        e = self.emit(x)
        start = torch.full((e.shape[0], 4), float("-inf")); start[:, 0] = 0.0
        alpha = torch.logsumexp(start[:, :, None] + self.trans, 1) + e[:, 0]
        for t in range(1, e.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.trans, 1) + e[:, t]
        return torch.logsumexp(alpha, -1).mean() - e.amax(-1).sum(-1).mean()
m = Crf(); o = torch.optim.Adam(m.parameters(), lr=1e-3)
for i in range(8):
    loss = m(torch.randn(3, 5, 6)).square()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    Script(
        "scale_that_grows_until_it_skips",
        HEAD
        + """
m = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
o = torch.optim.AdamW(m.parameters(), lr=1e-3)
s = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
for i in range(30):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (m(torch.randn(8, 6)).float() - 1).square().mean()
    o.zero_grad(); s.scale(loss).backward(); s.unscale_(o)
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0); s.step(o); s.update()
""",
        steps=30,
    ),
    Script(
        "functional_and_by_hand",
        HEAD
        + """
from torch.func import functional_call
m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
w = {k: v.detach().clone().requires_grad_() for k, v in m.named_parameters()}
mom = {k: torch.zeros_like(v) for k, v in w.items()}
for i in range(9):
    x = torch.randn(8, 6)
    loss = (functional_call(m, w, (x,)) - x[:, :1]).square().mean()
    g = torch.autograd.grad(loss, list(w.values()))
    with torch.no_grad():
        for (k, v), d in zip(w.items(), g):
            mom[k].mul_(0.9).add_(d); v.sub_(0.01 * mom[k])
""",
    ),
    Script(
        "apex_start_up",
        HEAD
        + """
from halfstep.compat.apex import amp
m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
o = torch.optim.SGD(m.parameters(), lr=0.1)
m, o = amp.initialize(m, o, opt_level="O2", loss_scale="dynamic", verbosity=0)
for i in range(20):
    o.zero_grad()
    loss = F.cross_entropy(m(torch.randn(4, 8)).float(), torch.randint(0, 3, (4,))) * 4
    with amp.scale_loss(loss, o) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(o), 1.0)
    o.step()
""",
    ),
    Script(
        "warm_restarts",
        HEAD
        + """
m = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 1))
o = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
s = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, eta_min=1e-7)
for i in range(16):
    x = torch.randn(16, 6)
    loss = F.smooth_l1_loss(m(x), x[:, :1])
    o.zero_grad(); loss.backward(); o.step(); s.step()
""",
    ),
    Script(
        "ragged_batches_of_a_recurrent_net",
        HEAD
        + """
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 7, batch_first=True, bidirectional=True); self.out = nn.Linear(14, 2)
    def forward(self, x, n):
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        gone = torch.arange(h.shape[1])[None] >= n[:, None]
        return self.out(h.masked_fill(gone[..., None], float("-inf")).amax(1))
m = Net(); o = torch.optim.RMSprop(m.parameters(), lr=1e-3)
for i in range(7):
    n = torch.randint(1, 6, (4,)); n[0] = 5
    loss = F.cross_entropy(m(torch.randn(4, 5, 5), n), torch.randint(0, 2, (4,)))
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
]
