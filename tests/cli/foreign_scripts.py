"""Training scripts that never heard of halfstep, and what `halfstep tune` must do with each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """A script; `refused`: words of the refusal, empty where it must be tried and be right."""

    name: str
    text: str
    refused: str = ""


_HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""

MLP = Foreign("mlp", _HEAD + """
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(256, 32)
y = x[:, :10].argmax(1)
for epoch in range(20):
    for rows in torch.randperm(256).split(32):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().numpy()
    model.train()
""")  # fmt: skip

CNN = Foreign("cnn", _HEAD + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.ReLU(),
        )
        self.head = nn.Linear(16 * 4, 4)

    def forward(self, x):
        return F.log_softmax(self.head(self.body(x).flatten(1)), dim=1)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
for step in range(60):
    y = torch.randint(0, 4, (16,))
    x = torch.randn(16, 1, 8, 8) + y[:, None, None, None]
    loss = F.nll_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
""")  # fmt: skip

GPT = Foreign("gpt", _HEAD + """
from dataclasses import dataclass
from torch.utils.checkpoint import checkpoint

@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, 2, c // 2).transpose(1, 2) for z in self.qkv(self.norm(x)).split(c, 2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self, words=32, width=32):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids=None, labels=None):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=bool(number))
        logits = self.head(self.norm(x))
        return Output(logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

model = GPT()
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
for step in range(60):
    ids = torch.arange(17) * torch.randint(1, 5, (8, 1)) % 32
    loss = model(ids=ids[:, :-1], labels=ids[:, 1:]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
""")  # fmt: skip

LSTM = Foreign("lstm", _HEAD + """
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 16), nn.Linear(24, 3)
        self.lstm = nn.LSTM(16, 24, batch_first=True)

    def encode(self, ids, lengths):
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for step in range(60):
    ids = torch.randint(1, 20, (8, 6))
    lengths = torch.tensor([6, 6, 5, 5, 4, 3, 3, 2])
    states = model.encode(ids, lengths)
    loss = F.cross_entropy(model.head(states).transpose(1, 2), ids % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")  # fmt: skip

GAN = Foreign("gan", _HEAD + """
maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
of_judge = torch.optim.SGD(judge.parameters(), lr=0.05)
of_maker = torch.optim.SGD(maker.parameters(), lr=0.05)
for step in range(60):
    real, fake = torch.randn(32, 2) * 0.3 + 1, maker(torch.randn(32, 8))
    loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
    inputs = real.clone().requires_grad_()
    slope, = torch.autograd.grad(judge(inputs).sum(), inputs, create_graph=True)
    of_judge.zero_grad()
    (loss + 0.1 * slope.square().sum(1).mean()).backward()
    of_judge.step()
    of_maker.zero_grad()
    F.softplus(-judge(fake)).mean().backward()
    of_maker.step()
""")  # fmt: skip

ACCUMULATION = Foreign("accumulation", _HEAD + """
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
noise = nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([*model.parameters(), noise], lr=0.02)
for step in range(60):
    for part in range(4):
        x = torch.randn(16, 32)
        error = (model(x)[:, 0] - x[:, :4].sum(1)).square().mean()
        loss = error * torch.exp(-noise) + noise + 1e-3 * sum(p.square().sum() for p in model.parameters())
        (loss / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
""")  # fmt: skip

OWN_LOSS = Foreign("own loss", _HEAD + """
class Contrast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a - b).square().mean().reshape(())

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        assert a.dtype == torch.float32
        return grad * 2 * (a - b) / a.numel(), None

encoder, decoder = nn.Linear(16, 6), nn.Linear(6, 16)
optimizer = torch.optim.Adagrad([*encoder.parameters(), *decoder.parameters()], lr=0.05)
for step in range(60):
    x = torch.randn(32, 4).repeat(1, 4)
    code = torch.tanh(encoder(x))
    loss = Contrast.apply(decoder(code), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")  # fmt: skip

OWN_SCALER = Foreign("own scaler", _HEAD + """
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(60):
    x = torch.randn(32, 32)
    loss = F.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""")  # fmt: skip

OWN_REGION = Foreign("own region", _HEAD + """
model = nn.Linear(32, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    x = torch.randn(32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""", "an autocast region of the script's own")  # fmt: skip

CLOSURE = Foreign("closure", _HEAD + """
model = nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
x = torch.randn(64, 8)

def closure():
    optimizer.zero_grad()
    loss = (model(x)[:, 0] - x.sum(1)).square().mean()
    loss.backward()
    return loss

for step in range(10):
    optimizer.step(closure)
""", "it steps LBFGS with a closure")  # fmt: skip

FUNCTIONAL = Foreign("functional call", _HEAD + """
from torch.func import functional_call, grad
model = nn.Linear(8, 1)
weights = {name: p.detach() for name, p in model.named_parameters()}

def loss_of(weights, x):
    return (functional_call(model, weights, x)[:, 0] - x.sum(1)).square().mean()

for step in range(60):
    slopes = grad(loss_of)(weights, torch.randn(16, 8))
    weights = {name: w - 0.1 * slopes[name] for name, w in weights.items()}
""", "functional code: it calls a module with weights that are not the module's own")  # fmt: skip

NO_MODULE = Foreign("no module", _HEAD + """
weight = torch.zeros(8, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(60):
    x = torch.randn(16, 8)
    loss = (x @ weight - x.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""", "functional code: no module with parameters is called")  # fmt: skip

HALF_WEIGHTS = Foreign("fp16 weights", _HEAD + """
model = nn.Linear(8, 1).half()
masters = [p.detach().float() for p in model.parameters()]
for step in range(60):
    x = torch.randn(16, 8)
    loss = (model(x.half())[:, 0].float() - x.sum(1)).square().mean()
    (loss * 128).backward()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters):
            master -= 0.1 * p.grad.float() / 128
            p.copy_(master)
            p.grad = None
""", "its weights are fp16 already")  # fmt: skip

BY_HAND = Foreign("by hand", _HEAD + """
model = nn.Linear(8, 1)
for step in range(60):
    x = torch.randn(16, 8)
    (model(x)[:, 0] - x.sum(1)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None
""", "weights updated by hand")  # fmt: skip

BCE = Foreign("bce", _HEAD + """
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    x = torch.randn(32, 32)
    loss = nn.BCELoss()(model(x)[:, 0], (x[:, 0] > 0).float())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
""")  # fmt: skip

TRIED = [MLP, CNN, GPT, LSTM, GAN, ACCUMULATION, OWN_LOSS, OWN_SCALER, BCE]
REFUSED = [OWN_REGION, CLOSURE, FUNCTIONAL, NO_MODULE, HALF_WEIGHTS, BY_HAND]
