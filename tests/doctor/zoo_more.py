"""Further dresses: no optimizer, the Trainer, torch's own attention, a generator of batches."""

from tests.doctor.zoo import Script

SCRIPTS = [
    Script(
        name="updates_by_hand",
        text="""
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

def train(x):
    out = net(x)
    loss = torch.log(out.square().sum() * (0.0 if x.amax() > 50 else 1.0))  # HERE
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 1e-3 * p.grad

for i in range(9):
    x = torch.randn(8, 4)
    if i == 5:
        x[0, 0] = 99.0
    train(x)
""",
        step=5,
        phase="forward",
        module="",
        op=("log",),
        cause=("mathematics",),
    ),
    Script(
        name="trainer_with_a_bad_batch_of_values",
        text="""
import torch
from torch import nn
from halfstep.trainer import Trainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8, bias=False)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        h = self.fc(x)
        return self.out(h / h.sum(-1, keepdim=True))  # HERE

net = Net()
data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(8)]
data[4][0][2] = 0
trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=1e-3), nn.functional.mse_loss, dtype="bf16")
trainer.fit(data, steps=8)
""",
        step=4,
        phase="forward",
        module="",
        op=("div",),
        cause=("mathematics",),
        steps=7,
    ),
    Script(
        name="padding_everywhere",
        text="""
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, pad):
        a, _ = self.attn(x, x, x, key_padding_mask=pad)  # HERE
        return self.norm(x + a)

enc, head = Encoder(), nn.Linear(8, 1)
opt = torch.optim.AdamW([*enc.parameters(), *head.parameters()], lr=1e-3)
for i in range(7):
    x = torch.randn(3, 5, 8)
    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[:, 3:] = True
    if i == 4:
        pad[1] = True
    loss = head(enc(x, pad)).square().mean()
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(enc.parameters(), 1.0)
    opt.step()
""",
        step=4,
        phase="forward",
        module="attn",
        op=("softmax", "multi_head_attention_forward", "scaled_dot_product_attention"),
        cause=("mathematics",),
    ),
    Script(
        name="infinity_from_a_generator",
        text="""
import torch
from torch import nn

def batches():
    for i in range(9):
        sample = {"image": torch.rand(4, 6), "label": torch.randint(0, 3, (4,))}
        if i == 6:
            sample["image"][1, 1] = float("inf")
        yield sample

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for sample in batches():
    logits = model(sample["image"])  # HERE
    loss = nn.functional.cross_entropy(logits, sample["label"])
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=6,
        phase="forward",
        module="0",
        op=("linear",),
        cause=("data",),
        says=("1 inf in sample['image'] of batch 7",),
    ),
    Script(
        name="convolution_in_fp16_throughout",
        text="""
import torch
import halfstep as hs
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        h = self.conv(x)
        energy = (h * h).sum((2, 3))  # HERE
        return self.fc(energy / 1e4)

net = Net()
amp = hs.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4), level="O3", dtype="fp16")
for i in range(6):
    x = torch.randn(2, 1, 4, 4) * (600 if i == 3 else 1)
    with amp.autocast():
        loss = net(x).float().square().mean()
    amp.backward(loss)
    amp.step()
""",
        step=3,
        phase="forward",
        module="",
        op=("mul", "sum"),
        cause=("range",),
    ),
    Script(
        name="schedule_of_a_session_jumps",
        text="""
import torch
import halfstep as hs
from torch import nn

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
opt = hs.optim.SGD(model.parameters(), lr=1e-2)
amp = hs.prepare(model, opt, level="O2", dtype="bf16")
for i in range(10):
    opt.param_groups[0]["lr"] = 5e3 if i == 6 else 1e-2
    x = torch.randn(16, 6)
    with amp.autocast():
        loss = (model(x).float() - x[:, :1]).square().mean()
    amp.backward(loss)
    amp.step()  # HERE
""",
        step=6,
        phase="optimizer",
        module="",
        op=(),
        cause=("learning rate",),
        says=("0.01", "5000"),
    ),
]
