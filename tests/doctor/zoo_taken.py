"""Training scripts whose bad step is taken: nothing skips it, so that it spoils what comes after.

`# HERE` marks the line the doctor must name; `steps` counts from 0.
"""

from tests.doctor.zoo import Script

SCRIPTS = [
    Script(
        name="distance_of_equal_points",
        text="""
import torch
from torch import nn

class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, a, b):
        d = self.body(a) - self.body(b)
        return torch.sqrt((d * d).sum(-1))  # HERE

class Runner:
    def __init__(self):
        self.model = Metric()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def one(self, a, b):
        self.opt.zero_grad()
        loss = self.model(a, b).mean()
        loss.backward()
        self.opt.step()

runner = Runner()
for i in range(10):
    a, b = torch.randn(8, 6), torch.randn(8, 6)
    if i == 6:
        b[2] = a[2]
    runner.one(a, b)
""",
        step=6,
        phase="backward",
        module="",
        op=("sqrt",),
        cause=("mathematics",),
        cure="clamp",
    ),
    Script(
        name="spread_of_a_constant",
        text="""
import torch, halfstep as hs
from torch import nn

class Whiten(nn.Module):
    def forward(self, h):
        return (h - h.mean(0)) / (h.var(0).sqrt() + 1e-3)  # HERE

model = nn.Sequential(nn.Linear(5, 7), Whiten(), nn.Linear(7, 1))
amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), level="O2", dtype="bf16")
for i in range(9):
    x = torch.randn(12, 5)
    if i == 4:
        x = x[:1].expand(12, 5)
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)
    amp.step()
""",
        step=4,
        phase="backward",
        module="1",
        op=("sqrt",),
        cause=("mathematics",),
        cure="clamp",
    ),
    Script(
        name="own_function",
        text="""
import torch
from torch import nn

class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * x / x.abs()  # HERE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(Sign.apply(self.first(x)))

net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for i in range(8):
    x = torch.randn(6, 4)
    if i == 3:
        x[1] = 0
    opt.zero_grad()
    net(x).pow(2).mean().backward()
    opt.step()
""",
        step=3,
        phase="backward",
        module="",
        op=("div",),
        cause=("mathematics",),
    ),
    Script(
        name="adam_in_half",
        text="""
import torch
from torch import nn

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).half()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(6):
    x = torch.randn(16, 6).half()
    loss = model(x).float().pow(2).mean() * 1e-3
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        step=0,
        phase="optimizer",
        module="",
        op=("addcdiv", "div"),
        cause=("precision",),
        says=("1e-08",),
        cure="masters",
    ),
    Script(
        name="learning_rate_out_of_range",
        text="""
import numpy as np, torch
from torch import nn

model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)

def train(step):
    opt.param_groups[0]["lr"] = float(np.float64(0.1) / np.abs(5 - step)) if step < 6 else 0.1
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    opt.step()  # HERE
    opt.zero_grad()

for step in range(9):
    train(step)
""",
        step=5,
        phase="optimizer",
        module="",
        op=("add", "sub", "mul"),
        cause=("learning rate",),
        says=("inf",),
    ),
    Script(
        name="log_of_a_saturated_probability",
        text="""
import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return torch.sigmoid(self.out(torch.relu(self.hidden(x))))

def nll(p, y):
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # HERE

model = Classifier()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(10):
    x = torch.randn(16, 3)
    y = (x[:, :1] > 0).float()
    if i == 7:
        x = x * 3000
    loss = nll(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=7,
        phase="forward",
        module="",
        op=("log",),
        cause=("mathematics",),
    ),
    Script(
        name="no_valid_token",
        text="""
import torch
from torch import nn
from torch.nn import functional as F

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 12)
        self.rnn = nn.GRU(12, 12, batch_first=True)
        self.out = nn.Linear(12, 5)

    def forward(self, t):
        return self.out(self.rnn(self.emb(t))[0])

tagger = Tagger()
opt = torch.optim.AdamW(tagger.parameters(), lr=1e-3)
for i in range(8):
    tokens = torch.randint(0, 30, (4, 7))
    tags = torch.randint(0, 5, (4, 7))
    if i == 5:
        tags[:] = -100
    logits = tagger(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100)  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        phase="forward",
        module="",
        op=("cross_entropy_loss",),
        cause=("mathematics",),
    ),
    Script(
        name="weights_that_sum_to_zero",
        text="""
import torch
from torch import nn

w1 = torch.randn(6, 8, requires_grad=True)
w2 = torch.randn(8, 1, requires_grad=True)
opt = torch.optim.Adam([w1, w2], lr=1e-2)

def forward(x):
    return torch.tanh(x @ w1) @ w2

for i in range(9):
    x = torch.randn(10, 6)
    weight = (x[:, :1] > (9.0 if i == 6 else 0.0)).float()
    err = (forward(x) - x[:, :1]) ** 2
    loss = (err * weight).sum() / weight.sum()  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=6,
        phase="forward",
        module="",
        op=("div",),
        cause=("mathematics",),
        cure="clamp",
    ),
    Script(
        name="variance_of_a_vae",
        text="""
import torch
from torch import nn

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(8, 6)
        self.dec = nn.Linear(3, 8)

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).clamp(-5, 5).exp()
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(-1).mean()  # HERE
        return self.dec(z), kl

vae = VAE()
opt = torch.optim.SGD(vae.parameters(), lr=1e-4)
for i in range(7):
    x = torch.randn(16, 8) * (400 if i == 4 else 1)
    rec, kl = vae(x)
    loss = (rec - x).square().mean() + kl
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
        step=4,
        phase="forward",
        module="",
        op=("exp",),
        cause=("range", "mathematics"),
    ),
    Script(
        name="angle_of_parallel_vectors",
        text="""
import torch
from torch import nn
from torch.nn import functional as F

class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(5, 3)

    def forward(self, a, b):
        cos = F.cosine_similarity(self.proj(a), self.proj(b)).clamp(-1, 1)
        return torch.acos(cos)  # HERE

net = Siamese()
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
for i in range(7):
    a = torch.randn(8, 5)
    b = a.clone() if i == 2 else torch.randn(8, 5)
    opt.zero_grad()
    net(a, b).mean().backward()
    opt.step()
""",
        step=2,
        phase="backward",
        module="",
        op=("acos",),
        cause=("mathematics",),
    ),
    Script(
        name="gradient_normalised_by_hand",
        text="""
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)

def normalise(parameters):
    with torch.no_grad():
        for p in parameters:
            p.grad /= p.grad.norm()  # HERE

for i in range(8):
    x = torch.randn(16, 4)
    if i == 5:
        with torch.no_grad():
            model[0].bias.fill_(-100.0)
    loss = (model(x) - x[:, :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    normalise(model.parameters())
    opt.step()
""",
        step=5,
        phase="optimizer",
        module="",
        op=("div",),
        cause=("mathematics",),
    ),
    Script(
        name="own_optimizer",
        text="""
import torch
from torch import nn

class RMS(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p].setdefault("v", torch.zeros_like(p))
                v.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.sub_(group["lr"] * p.grad / v.sqrt())  # HERE

emb = nn.EmbeddingBag(12, 4)
head = nn.Linear(4, 1)
opt = RMS([*emb.parameters(), *head.parameters()])
for i in range(5):
    rows = torch.arange(12).view(3, 4) if i < 3 else torch.arange(8).view(2, 4)
    loss = head(emb(rows)).square().mean()
    opt.zero_grad()
    loss.backward()
    if i == 3:
        emb.weight.grad.zero_(); opt.state[emb.weight]["v"].zero_()
    opt.step()
""",
        step=3,
        phase="optimizer",
        module="",
        op=("div",),
        cause=("mathematics",),
    ),
    Script(
        name="gradient_penalty",
        text="""
import torch
from torch import nn

critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
gen = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3)
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3)

def penalty(x):
    x = x.detach().requires_grad_()
    g, = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (torch.sqrt((g * g).sum(-1)) - 1).square().mean()  # HERE

for i in range(6):
    real, fake = torch.randn(6, 4), gen(torch.randn(6, 2))
    if i == 4:
        with torch.no_grad():
            critic[0].bias.fill_(-50.0)
    opt_c.zero_grad()
    loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty(real)
    loss.backward()
    opt_c.step()
    opt_g.zero_grad()
    (-critic(gen(torch.randn(6, 2))).mean()).backward()
    opt_g.step()
""",
        step=4,
        phase="backward",
        module="",
        op=("sqrt",),
        cause=("mathematics",),
        cure="clamp",
    ),
    Script(
        name="masked_row_of_attention",
        text="""
import torch
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x, keep):
        q, k, v = self.qkv(x).chunk(3, -1)
        score = (q @ k.transpose(-1, -2)) / 8**0.5
        score = score.masked_fill(~keep[:, None, :], float("-inf"))
        return self.out(torch.softmax(score, -1) @ v)  # HERE

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = SelfAttention()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, keep):
        return self.norm(x + self.attn(x, keep))

model = Block()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(7):
    x = torch.randn(4, 6, 8)
    keep = torch.rand(4, 6) > 0.2
    keep[:, 0] = True
    if i == 5:
        keep[1] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x, keep).float().square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
        step=5,
        phase="forward",
        module="attn",
        op=("softmax",),
        cause=("mathematics",),
    ),
    Script(
        name="where_trap_of_a_norm",
        text="""
import torch
import halfstep as hs
from torch import nn

class Unit(nn.Module):
    def forward(self, x):
        n = (x * x).sum(-1, keepdim=True)
        return torch.where(n > 0, x / n, torch.zeros_like(x))  # HERE

net = nn.Sequential(nn.Linear(4, 4, bias=False), Unit(), nn.Linear(4, 1))
amp = hs.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-2), level="O0")

def step(x):
    with amp.autocast():
        loss = net(x).square().mean()
    amp.backward(loss)
    return amp.step()

for i in range(6):
    x = torch.randn(5, 4)
    if i == 3:
        x[0] = 0
    step(x)
""",
        step=3,
        phase="backward",
        module="1",
        op=("div",),
        cause=("mathematics",),
    ),
    Script(
        name="session_in_fp16_throughout",
        text="""
import torch
import halfstep as hs
from torch import nn

class Ratio(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)  # HERE

model = nn.Sequential(nn.Linear(6, 6, bias=False), Ratio(), nn.Linear(6, 2))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
amp = hs.prepare(model, opt, level="O3", dtype="bf16")
for i in range(7):
    x = torch.randn(8, 6)
    if i == 4:
        x[3] = 0
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)
    amp.step()
""",
        step=4,
        phase="forward",
        module="1",
        op=("div",),
        cause=("mathematics",),
        cure="clamp",
    ),
]
