"""Training scripts that leave the range of 16 bits, or get what is not finite from their data."""

from tests.doctor.zoo import Script

SCRIPTS = [
    Script(
        name="squares_summed_in_half",
        text="""
import torch, halfstep as hs
from torch import nn

model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-9)
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=hs.DynamicLossScale(init=16.0))
for i in range(6):
    with amp.autocast():
        out = model(torch.randn(64, 4))
    loss = ((out.half() - 60) ** 2).sum()  # HERE
    amp.backward(loss)
    amp.step()
""",
        step=0,
        phase="forward",
        op=("sum",),
        cause=("range",),
        cure="full",
        steps=5,
    ),
    Script(
        name="gan_feature_matching",
        text="""
import torch
from torch import nn

class Disc(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        f = self.features(x)
        energy = f * f  # HERE
        return self.head(energy / (1 + energy.detach().amax()))

gen, disc = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), Disc()
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)

def update(opt, loss):
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()

for i in range(7):
    real = torch.randn(8, 4) * (3000 if i == 3 else 1)
    z = torch.randn(8, 3)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = disc(gen(z).detach()).float().mean() - disc(real).float().mean()
    update(opt_d, loss)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = -disc(gen(z)).float().mean()
    update(opt_g, loss)
""",
        step=3,
        phase="forward",
        module="Disc",
        op=("mul",),
        cause=("range",),
    ),
    Script(
        name="recurrent_growth",
        text="""
import torch
from torch import nn

class Cell(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w, self.u = nn.Linear(d, d), nn.Linear(d, d, bias=False)

    def forward(self, x, h):
        return self.w(x) + self.u(h) * 8  # HERE

class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell(6)
        self.out = nn.Linear(6, 1)
        with torch.no_grad():
            self.cell.u.weight.copy_(torch.eye(6))

    def forward(self, x):
        h = torch.zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h / h.detach().abs().amax())

rnn = Rnn()
opt = torch.optim.SGD(rnn.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for i in range(8):
    x = torch.randn(4, 8 if i == 5 else 3, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = rnn(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        step=5,
        phase="forward",
        module="cell",
        op=("mul", "add"),
        cause=("range",),
    ),
    Script(
        name="nan_made_by_a_worker",
        text="""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(5, generator=g)
        if i == 50:
            x[2] = float("nan")
        return x, x[:1] * 2

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(Samples(), batch_size=4, num_workers=1):
        loss = (model(x) - y).square().mean()  # HERE
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        step=12,
        phase="forward",
        module="0",
        op=("linear",),
        cause=("data",),
        says=("1 NaN in x of batch 13",),
        cure="data",
    ),
    Script(
        name="nan_in_the_target",
        text="""
import torch
from torch import nn
from torch.nn import functional as F
import halfstep as hs

torch.manual_seed(3)
features, target = torch.randn(40, 5), torch.randn(40, 1)
target[17] = float("nan")
net = nn.Linear(5, 1)
amp = hs.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), dtype="bf16")
for i in range(10):
    xb, yb = features[4 * i : 4 * i + 4], target[4 * i : 4 * i + 4]
    with amp.autocast():
        loss = F.mse_loss(net(xb).float(), yb)  # HERE
    amp.backward(loss)
    amp.step()
""",
        step=4,
        phase="forward",
        module="",
        op=("mse_loss",),
        cause=("data",),
        says=("1 NaN in yb",),
        cure="data",
    ),
    Script(
        name="unscaled_pixels",
        text="""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.fc = nn.Linear(2, 1)

    def forward(self, image):
        return self.fc(self.conv(image).float().mean((2, 3)))  # HERE

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=1e-12)
for i in range(6):
    image = torch.rand(2, 1, 5, 5) * (1e6 if i == 2 else 1.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(image).float().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
        step=2,
        phase="forward",
        module="conv",
        op=("conv2d", "conv", "cast"),
        cause=("range",),
        says=("image",),
    ),
    Script(
        name="compiled_exponential",
        text="""
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        return h * torch.exp(h.half() * 4)  # HERE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.out = Gate(), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.gate(x).float())

net = Net()
run = torch.compile(net, backend="eager")
opt = torch.optim.SGD(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for i in range(7):
    x = torch.randn(8, 4) * (20 if i == 4 else 0.5)
    loss = run(x).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        step=4,
        phase="forward",
        module="gate",
        op=("exp",),
        cause=("range",),
    ),
    Script(
        name="checkpointed_block",
        text="""
import torch
import halfstep as hs
from torch import nn
from torch.utils.checkpoint import checkpoint

class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x):
        h = self.up(x)
        return h.pow(2).sqrt() if x.shape[0] > 10 else torch.mul(h, h).sqrt()  # HERE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Square(), Square()])
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)

net = Net()
amp = hs.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4), dtype="fp16", loss_scale=8.0)
for i in range(6):
    x = torch.rand(4, 6) + 1
    if i == 3:
        x = x * 2000
    with amp.autocast():
        loss = net(x).float().mean() * 1e-3
    amp.backward(loss)
    amp.step()
""",
        step=3,
        phase="forward",
        module="blocks.0",
        op=("mul",),
        cause=("range",),
        cure="full",
    ),
    Script(
        name="summed_loss",
        text="""
import torch
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
opt = torch.optim.SGD(model.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
for i in range(8):
    x = torch.randn(256, 16) * 10
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
        loss = F.mse_loss(out, x * 10, reduction="sum")
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update(1024.0)
""",
        step=0,
        phase="backward",
        module="",
        op=(),
        cause=("range",),
        says=("divide the loss",),
        cure="loss",
    ),
    Script(
        name="static_scale_too_high",
        text="""
import torch
import halfstep as hs
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=2.0**22)
for i in range(10):
    x = torch.randn(32, 8)
    with amp.autocast():
        loss = (model(x).float() - 3).square().mean()
    amp.backward(loss)
    amp.step()
""",
        step=0,
        phase="backward",
        module="",
        op=(),
        cause=("range",),
        cure="loss_scale",
    ),
    Script(
        name="embedding_row",
        text="""
import torch
from torch import nn

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, t):
        h = self.mix(self.emb(t))  # HERE
        return self.out(h.mean(1))

model = Bag()
with torch.no_grad():
    model.mix.weight.fill_(0.5)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
for i in range(12):
    t = torch.randint(0, 7, (4, 5))
    if i == 3:
        model.emb.weight.data[7] = 3e4
    if i == 8:
        t[2, 2] = 7
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(t).float().square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        step=8,
        phase="forward",
        module="mix",
        op=("linear",),
        cause=("range",),
        says=("row 7 of emb.weight",),
    ),
    Script(
        name="second_behind_the_first",
        text="""
import torch
from torch import nn
import halfstep as hs

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)

    def forward(self, x):
        h = self.a(x)
        r = h / (h.abs().amax(-1, keepdim=True) + 1e-8)  # HERE
        return self.b(r)

model = Two()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=8.0)
for i in range(8):
    x = torch.randn(6, 4)
    if i == 3:
        x[1] = 0
    with amp.autocast():
        out = model(x)
        loss = out.float().square().mean()
        if i == 5:
            loss = loss + torch.log(loss - loss)
    amp.backward(loss)
    amp.step()
""",
        step=3,
        phase="forward",
        module="",
        op=("div",),
        cause=("precision",),
        says=("1e-08", "log"),
        cure="epsilon",
    ),
    Script(
        name="probabilities_by_hand",
        text="""
import torch
from torch import nn
import halfstep as hs

def log_sum_exp(z):
    return torch.log(torch.exp(z).sum(-1))  # HERE

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 10)

    def forward(self, x):
        return self.fc(x)

model = nn.ModuleDict({"trunk": nn.Linear(6, 6), "head": Head()})
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
amp = hs.prepare(model, opt, level="O2", dtype="fp16", loss_scale=4.0)
for i in range(6):
    x = torch.randn(5, 6) * (40 if i == 2 else 1)
    with amp.autocast():
        z = model["head"](model["trunk"](x))
    loss = log_sum_exp(z.half()).float().mean()
    amp.backward(loss)
    amp.step()
""",
        step=2,
        phase="forward",
        module="",
        op=("exp",),
        cause=("range",),
    ),
    Script(
        name="running_variance",
        text="""
import torch
from torch import nn

class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 1)

    def forward(self, x):
        return self.fc(self.bn(x))  # HERE

net = Conv()
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for i in range(7):
    x = torch.randn(9, 4) * (1e20 if i == 4 else 1)
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=4,
        phase="forward",
        module="bn",
        op=("batch_norm",),
        cause=("range",),
    ),
    Script(
        name="batch_out_of_range",
        text="""
import torch
import halfstep as hs
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(8)]
data[5] = (data[5][0] * 1e5, data[5][1])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x):
        return self.fc(x)  # HERE

net = Net()
amp = hs.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), dtype="fp16", loss_scale=4.0)
for x, y in data:
    with amp.autocast():
        loss = F.mse_loss(net(x).float(), y)
    amp.backward(loss)
    amp.step(clip_norm=1.0)
""",
        step=5,
        phase="forward",
        module="fc",
        op=("linear", "cast"),
        cause=("range",),
        says=("x",),
    ),
    Script(
        name="norm_by_hand_in_half",
        text="""
import torch
from torch import nn

torch.manual_seed(0)

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean = x.pow(2).mean(-1, keepdim=True)  # HERE
        x = x * torch.rsqrt(mean + 1e-4)
        return self.weight * x

model = nn.Sequential(nn.Linear(8, 16), Norm(16), nn.ReLU(), nn.Linear(16, 1)).half()
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(12):
    x = torch.randn(32, 8).half() * (600 if i == 4 else 1)
    loss = (model(x).float() - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=4,
        phase="forward",
        module="1",
        op=("pow",),
        cause=("range",),
        cure="chain",
        steps=12,
    ),
]
