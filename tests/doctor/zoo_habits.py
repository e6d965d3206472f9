"""Faults as habits make them: schedules, masks, losses by hand, frozen parts, own updates."""

from tests.doctor.zoo import Script

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"


def _fault(name, body, **truth):
    return Script(name, HEAD + body, **truth)


SCRIPTS = [
    _fault(
        "one_cycle_with_a_wrong_peak",
        """
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=50.0, total_steps=20)  # 0.05 was meant
for i in range(20):
    x = torch.randn(32, 8)
    loss = F.mse_loss(net(x), x.sum(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
    sched.step()
""",
        phase="optimizer",
        cause=("divergence", "learning rate"),
        says=("learning rate",),
    ),
    _fault(
        "second_group_set_by_hand",
        """
body, head = nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 1)
opt = torch.optim.Adam([{"params": body.parameters()}, {"params": head.parameters(), "lr": 2e-3}], lr=1e-3)

def epoch(n):
    if n == 3:
        opt.param_groups[1]["lr"] = 2e3
    for _ in range(3):
        x = torch.randn(16, 6)
        yield F.mse_loss(head(body(x)), x[:, :1])

for n in range(6):
    for loss in epoch(n):
        opt.zero_grad()
        loss.backward()
        opt.step()  # HERE
""",
        step=9,
        phase="optimizer",
        cause=("learning rate",),
        says=("0.002", "2000"),
    ),
    _fault(
        "restart_of_another_schedule",
        """
class Fit:
    def __init__(self):
        torch.manual_seed(5)
        self.m = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))
        self.o = torch.optim.SGD(self.m.parameters(), lr=0.02, momentum=0.9)
        self.s = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.o, T_0=4)

    def run(self):
        for i in range(16):
            x = torch.randn(20, 5)
            self.o.zero_grad()
            F.mse_loss(self.m(x), x[:, :2]).backward()
            self.o.step()  # HERE
            if i == 6:
                self.s.base_lrs = [2e4]
            self.s.step()

Fit().run()
""",
        step=7,
        phase="optimizer",
        cause=("learning rate",),
    ),
    _fault(
        "target_made_by_a_division",
        """
counts = torch.randint(1, 9, (48,), generator=torch.Generator().manual_seed(2)).float()
counts[29] = 0.0
rates = (60.0 / counts)[:, None]
x = torch.randn(48, 5)
model = nn.Sequential(nn.Linear(5, 12), nn.SiLU(), nn.Linear(12, 1))
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for i in range(6):
    rows = slice(8 * i, 8 * i + 8)
    target = rates[rows]
    loss = F.l1_loss(model(x[rows]), target)  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=3,
        phase="forward",
        cause=("data",),
        says=("1 inf in target",),
    ),
    _fault(
        "weight_of_a_class_without_examples",
        """
seen = torch.tensor([40.0, 25.0, 0.0])
balance = seen.sum() / seen * (seen / seen.sum())
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss(weight=balance)
for i in range(9):
    y = torch.randint(0, 2, (12,))
    if i == 6:
        y[5] = 2
    loss = criterion(model(torch.randn(12, 4)), y)  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=6,
        phase="forward",
        cause=("data", "weights"),
        says=("1 NaN",),
    ),
    _fault(
        "mean_of_nothing",
        """
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.box, self.obj = nn.Linear(16, 4), nn.Linear(16, 1)

    def losses(self, x, boxes, found):
        h = torch.tanh(self.trunk(x))
        miss = F.binary_cross_entropy_with_logits(self.obj(h).squeeze(-1), found.float())
        off = (self.box(h)[found] - boxes[found]).abs().mean()  # HERE
        return miss + off

net = Detector()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i in range(9):
    found = torch.rand(10) < (0.0 if i == 5 else 0.5)
    loss = net.losses(torch.randn(10, 6), torch.randn(10, 4), found)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
""",
        step=5,
        phase="forward",
        op=("mean",),
        cause=("mathematics", "data"),
        says=("empty",),
    ),
    _fault(
        "label_torn_by_a_worker",
        """
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(5, generator=g)
        return {"x": x, "y": x.sum() / (0.0 if i == 34 else 1.0)}

def together(rows):
    return {k: torch.stack([r[k] for r in rows]) for k in rows[0]}

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in DataLoader(Rows(), batch_size=6, num_workers=1, collate_fn=together):
        loss = F.mse_loss(model(batch["x"]).squeeze(-1), batch["y"])  # HERE
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        step=5,
        phase="forward",
        cause=("data",),
        says=("1 inf in batch['y']",),
    ),
    _fault(
        "row_of_padding_only",
        """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 8, padding_idx=0)
        self.tags = nn.Linear(8, 5)

    def forward(self, words):
        return self.tags(self.words(words))

def per_sentence(logits, tags, keep):
    nll = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="none").view_as(tags)
    return ((nll * keep).sum(1) / keep.sum(1)).mean()  # HERE

net = Tagger()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for i in range(10):
    words = torch.randint(1, 30, (4, 6))
    words[1, 3:] = 0
    if i == 7:
        words[2] = 0
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(words)
    loss = per_sentence(logits.float(), words % 5, (words != 0).float())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        step=7,
        phase="forward",
        op=("div",),
        cause=("mathematics",),
        cure="clamp",
    ),
    _fault(
        "log_of_a_softmax",
        """
class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return torch.softmax(self.net(x) * 2, dim=-1)

def distil(p, q):
    return -(q * torch.log(p)).sum(-1).mean()  # HERE

net = Student()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i in range(10):
    x = torch.randn(8, 6)
    if i == 6:
        x[0] *= 5e3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = net(x)
    loss = distil(p.float(), torch.softmax(torch.randn(8, 4), -1))
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
        step=6,
        phase="forward",
        op=("log",),
        cause=("mathematics",),
        says=("log_softmax",),
    ),
    _fault(
        "log_variance_in_half",
        """
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu, self.logvar, self.out = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x):
        mu, logvar = self.mu(x), self.logvar(x)
        std = torch.exp(logvar)  # HERE
        return self.out(mu + std * torch.randn_like(std)), mu, logvar

vae = Vae().half()
opt = torch.optim.SGD(vae.parameters(), lr=1e-5)
for i in range(8):
    x = torch.randn(5, 6).half()
    if i == 4:
        x = x * 18
    y, mu, logvar = vae(x)
    loss = (y.float() - x.float()).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=4,
        phase="forward",
        op=("exp",),
        cause=("range",),
    ),
    _fault(
        "mask_of_a_billion_in_half",
        """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, keep):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
        scores = scores + (1 - keep[:, None].to(scores.dtype)) * -1e9  # HERE
        return scores.softmax(-1) @ self.v(x)

net = nn.ModuleDict({"attn": Attention(), "head": nn.Linear(8, 2)}).half()
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for i in range(8):
    x, keep = torch.randn(3, 5, 8).half(), torch.ones(3, 5)
    keep[:, 4] = 0
    if i == 5:
        keep[1] = 0
    logits = net["head"](net["attn"](x, keep)).float()
    loss = logits.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        phase="forward",
        op=("mul",),
        cause=("range",),
    ),
    _fault(
        "layer_norm_without_epsilon",
        """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 8, bias=False)
        self.norm = nn.LayerNorm(8, eps=0.0)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.norm(self.lift(x)))  # HERE

model = Encoder()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(8):
    x = torch.randn(6, 4)
    if i == 3:
        x[2] = 0.0
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=3,
        phase="forward",
        module="norm",
        op=("layer_norm",),
        cause=("mathematics",),
    ),
    _fault(
        "temperature_that_reaches_zero",
        """
class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.t = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.fc(x) / self.t  # HERE

net = Scorer()
opt = torch.optim.SGD([{"params": net.fc.parameters()}, {"params": [net.t], "lr": 0.125}], lr=1e-3)
for i in range(9):
    loss = F.cross_entropy(net(torch.randn(8, 5)), torch.randint(0, 3, (8,))) + 50 * net.t
    opt.zero_grad()
    loss.backward()
    net.t.grad.sign_()
    opt.step()
""",
        step=4,
        phase="forward",
        op=("div",),
        cause=("mathematics",),
        cure="clamp",
    ),
    _fault(
        "poisoned_padding_row",
        """
emb = nn.Embedding(20, 6, padding_idx=0)
with torch.no_grad():
    emb.weight[0] = float("nan")
rnn, head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 2)
opt = torch.optim.Adam([*emb.parameters(), *rnn.parameters(), *head.parameters()], lr=1e-3)
for i in range(9):
    words = torch.randint(1, 20, (4, 5))
    if i == 5:
        words[0, 3:] = 0
    h, _ = rnn(emb(words))
    loss = F.cross_entropy(head(h[:, -1]), torch.randint(0, 2, (4,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        phase="forward",
        cause=("weights",),
        says=("weight",),
    ),
    _fault(
        "gram_matrix_in_a_checkpointed_block",
        """
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        gram = torch.matmul(h.transpose(1, 2), h)  # HERE
        return x + self.b(torch.matmul(h, gram / 1e5))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 1)

    def forward(self, x, gain):
        for n, block in enumerate(self.blocks):
            x = checkpoint(block, x * gain if n == 1 else x, use_reentrant=False)
        return self.head(x)

net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
for i in range(9):
    x = torch.randn(2, 30, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x, 250.0 if i == 5 else 1.0)
    loss = out.float().tanh().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
""",
        step=5,
        phase="forward",
        module="blocks.1",
        op=("matmul",),
        cause=("range",),
        cure="bf16",
    ),
    _fault(
        "power_with_its_own_derivative",
        """
class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x.clamp_min(0) ** p

    @staticmethod
    def backward(ctx, grad):
        x, p = ctx.saved_tensors
        y = x.clamp_min(0) ** p
        dp = (grad * y * torch.log(x.clamp_min(0))).sum()  # HERE
        return grad * p * x.clamp_min(1e-6) ** (p - 1), dp

class Gamma(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return Power.apply(x, self.p)

model = nn.Sequential(Gamma(), nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(8):
    x = torch.rand(6, 4) + 0.1
    if i == 4:
        x[0, 0] = 0.0
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=4,
        phase="backward",
        module="0",
        op=("log",),
        cause=("mathematics",),
    ),
    _fault(
        "critic_that_has_won",
        """
G = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 4))
D = nn.Sequential(nn.Linear(4, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
og = torch.optim.Adam(G.parameters(), lr=1e-3)
od = torch.optim.Adam(D.parameters(), lr=1e-3)

def score(real, fake):
    gap = D(real) - D(fake)
    return torch.sigmoid(gap)

for i in range(9):
    real = torch.randn(8, 4)
    loss_d = -torch.log(score(real, G(torch.randn(8, 2)).detach()) + 1e-6).mean()
    od.zero_grad()
    loss_d.backward()
    od.step()
    if i == 6:
        with torch.no_grad():
            D[2].weight.mul_(3e4)
    loss_g = -torch.log(1 - score(real, G(torch.randn(8, 2)))).mean()  # HERE
    og.zero_grad()
    loss_g.backward()
    og.step()
""",
        step=6,
        phase="forward",
        op=("log",),
        cause=("mathematics", "precision"),
    ),
    _fault(
        "expert_without_tokens",
        """
class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        best = share.argmax(-1)
        y = torch.stack([e(x) for e in self.experts], 1)[torch.arange(len(x)), best]
        load = F.one_hot(best, 4).float()
        usual = (share * load).sum(0) / load.sum(0)  # HERE
        return y * share.amax(-1, keepdim=True), usual.var()

moe, head = Moe(), nn.Linear(6, 1)
with torch.no_grad():
    moe.gate.weight.mul_(6)
opt = torch.optim.AdamW([*moe.parameters(), *head.parameters()], lr=1e-3)
for i in range(9):
    x = torch.randn(64, 6)
    if i == 6:
        x = x[:1].expand(64, 6)
    y, balance = moe(x)
    loss = head(y).square().mean() + 0.01 * balance
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=6,
        phase="forward",
        op=("div",),
        cause=("mathematics",),
        cure="clamp",
    ),
    _fault(
        "average_with_a_decay_of_ten",
        """
import copy
torch.manual_seed(4)
online = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
target = copy.deepcopy(online)
opt = torch.optim.SGD(online.parameters(), lr=1e-4)
decay = 10.0  # 1.0 - 1e-0 was meant

for i in range(34):
    x = torch.randn(12, 6)
    with torch.no_grad():
        y = target(x)
    loss = F.mse_loss(online(x), y)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(online.parameters(), 1.0)
    opt.step()
    with torch.no_grad():
        for a, b in zip(target.parameters(), online.parameters()):
            a.mul_(decay).add_(b, alpha=1 - decay)
""",
        phase="optimizer",
        cause=("divergence",),
        steps=34,
    ),
    _fault(
        "micro_batches_that_add_up",
        """
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).half()
opt = torch.optim.SGD(net.parameters(), lr=1e-9)
for i in range(8):
    for micro in range(6):
        x = torch.rand(4, 8).half() + 0.5
        out = net(x).float()
        loss = (out * (4e3 if i == 5 else 1.0)).sum()
        loss.backward()  # HERE
    opt.step()
    opt.zero_grad()
""",
        step=5,
        phase="backward",
        cause=("range",),
    ),
    _fault(
        "frozen_norm_from_a_broken_checkpoint",
        """
class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x))).mean(-1)  # HERE

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(4, 2)
        state = self.backbone.state_dict()
        state["bn.running_var"] = torch.tensor([1.0, 0.5, -0.2, 1.0])
        self.backbone.load_state_dict(state)
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))

model = Model().train()
opt = torch.optim.SGD(model.head.parameters(), lr=0.1)
for i in range(6):
    loss = F.cross_entropy(model(torch.randn(5, 2, 7)), torch.randint(0, 2, (5,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=0,
        phase="forward",
        module="backbone.bn",
        op=("batch_norm",),
        cause=("mathematics", "weights"),
        says=("running_var",),
    ),
    _fault(
        "weight_decay_of_three_hundred",
        """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=300)  # 0.03 was meant
for i in range(20):
    x = torch.randn(16, 6)
    loss = F.mse_loss(net(x), x[:, :1])
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        phase="optimizer",
        cause=("divergence", "weight decay"),
        says=("weight decay",),
    ),
    _fault(
        "second_moment_without_memory",
        """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.0))
for i in range(14):
    x = torch.randn(16, 5)
    loss = (net(x) - x[:, :1]).square().mean() * (0.0 if i == 9 else 1.0)
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        step=9,
        phase="optimizer",
        cause=("divergence", "learning rate"),
        says=("update",),
    ),
    _fault(
        "root_of_a_perfect_fit",
        """
net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)

def rmse(a, b):
    return torch.sqrt(F.mse_loss(a, b))  # HERE

for i in range(9):
    x = torch.randn(8, 3)
    out = net(x)
    y = out.detach().clone() if i == 6 else x[:, :1]
    opt.zero_grad()
    rmse(out, y).backward()
    opt.step()
""",
        step=6,
        phase="backward",
        op=("sqrt",),
        cause=("mathematics",),
        cure="clamp",
    ),
    _fault(
        "softplus_by_hand",
        """
def softplus(x):
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))  # HERE

w = torch.randn(5, 3, generator=torch.Generator().manual_seed(3)).requires_grad_()
opt = torch.optim.SGD([w], lr=1e-3)
for i in range(9):
    x = torch.randn(7, 5)
    if i == 5:
        x[2] = 200 * torch.sign(w[:, 0].detach())
    loss = softplus(x @ w).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        phase="forward",
        op=("exp",),
        cause=("range", "mathematics"),
    ),
    _fault(
        "opaque_sample_on_a_ray",
        """
class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, points):
        return 1 - torch.exp(-F.softplus(self.mlp(points).squeeze(-1)))

def render(alpha, colour):
    clear = torch.cumprod(1 - alpha, -1)
    weight = alpha * clear / (1 - alpha)  # HERE
    return (weight * colour).sum(-1)

field = Field()
opt = torch.optim.Adam(field.parameters(), lr=1e-3)
for i in range(9):
    points = torch.rand(4, 12, 3)
    if i == 6:
        points[1, 7] = 400.0
        with torch.no_grad():
            field.mlp[2].weight.abs_()
            field.mlp[2].bias.fill_(30.0)
    loss = render(field(points), torch.rand(4, 12)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=6,
        phase="forward",
        op=("div",),
        cause=("mathematics",),
        cure="clamp",
    ),
    _fault(
        "entropy_of_a_certain_half",
        """
def bce(p, y):
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # HERE

net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).half()
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for i in range(8):
    x = torch.randn(10, 4).half()
    if i == 5:
        with torch.no_grad():
            net[2].bias.fill_(9.5)
    p = torch.sigmoid(net(x))
    y = (x[:, :1] > 0).half()
    loss = bce(p, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        phase="forward",
        op=("log",),
        cause=("precision",),
        cure="clamp",
    ),
    _fault(
        "transcript_longer_than_the_sound",
        """
class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(5, 8), nn.Linear(8, 6)

    def forward(self, x):
        return F.log_softmax(self.out(self.rnn(x)[0]), -1)

net = Listener()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
ctc = nn.CTCLoss(blank=0)
for i in range(8):
    frames, letters = (9, 4) if i != 5 else (5, 8)
    logp = net(torch.randn(frames, 3, 5))
    words = torch.randint(1, 6, (3, letters))
    loss = ctc(logp, words, torch.full((3,), frames), torch.full((3,), letters))  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=5,
        phase="forward",
        op=("ctc_loss",),
        cause=("mathematics", "data"),
        says=("ctc_loss",),
    ),
    _fault(
        "dropout_scheduled_to_one",
        """
class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = 0.0

    def forward(self, x):
        keep = (torch.rand_like(x) >= self.p).float()
        return x * keep / (1 - self.p)  # HERE

drop = Drop()
net = nn.Sequential(nn.Linear(5, 12), drop, nn.ReLU(), nn.Linear(12, 2))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for i in range(9):
    drop.p = min(1.0, i / 6)
    loss = F.cross_entropy(net(torch.randn(8, 5)), torch.randint(0, 2, (8,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=6,
        phase="forward",
        module="1",
        op=("div",),
        cause=("mathematics",),
    ),
]

HEALTHY = [
    _fault(
        "angle_of_a_still_object",
        """
class Heading(nn.Module):
    def __init__(self):
        super().__init__()
        self.speed = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        v = self.speed(x)
        return torch.atan2(v[:, 1], v[:, 0])

net = Heading()
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for i in range(8):
    x = torch.randn(6, 4)
    if i == 4:
        x[3] = 0.0
    loss = (1 - torch.cos(net(x) - 0.3)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    _fault(
        "additive_masks_in_half",
        """
class Attention(nn.Module):
    def __init__(self):
        super().__init__(); self.qkv = nn.Linear(8, 24)
    def forward(self, x, bias):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(1, 2) / 8**0.5 + bias).softmax(-1) @ v
m = nn.Sequential(nn.Linear(8, 8)); a = Attention().half(); m.half()
o = torch.optim.SGD([*m.parameters(), *a.parameters()], lr=1e-2)
for i in range(9):
    bias = torch.zeros(3, 1, 6).half(); bias[..., 4:] = float("-inf")
    loss = a(m(torch.randn(3, 6, 8).half()), bias).float().square().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _fault(
        "skips_at_the_start_of_accumulation",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 2))
o = torch.optim.AdamW(m.parameters(), lr=1e-3)
s = torch.amp.GradScaler("cpu", init_scale=2.0**23)
for i in range(24):
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(m(torch.randn(8, 6)), torch.randint(0, 2, (8,))) / 2
        s.scale(loss).backward()
    s.unscale_(o); nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    s.step(o); s.update(); o.zero_grad()
""",
        steps=24,
    ),
    _fault(
        "loss_that_is_zero",
        """
m = nn.Linear(3, 1, bias=False)
o = torch.optim.SGD(m.parameters(), lr=0.5)
for i in range(16):
    x = torch.randn(24, 3); y = torch.sign(x[:, :1]); x[:, :1] += 2 * y
    loss = torch.relu(1 - y * m(x)).mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _fault(
        "large_losses_that_settle",
        """
m = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
o = torch.optim.Adam(m.parameters(), lr=3e-1)
for i in range(20):
    x = torch.rand(32, 4); y = 2000 * x.sum(1, keepdim=True)
    loss = F.mse_loss(m(x), y)
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _fault(
        "auxiliary_losses_at_weight_zero",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body, self.main, self.aux = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 3)
    def forward(self, x):
        h = torch.tanh(self.body(x)); return self.main(h), self.aux(h)
m = Net(); o = torch.optim.AdamW(m.parameters(), lr=1e-3)
for i in range(12):
    a, b = m(torch.randn(8, 5))
    loss = F.cross_entropy(a, torch.randint(0, 2, (8,)))
    loss = loss + (0.0 if i < 6 else 0.1) * F.cross_entropy(b, torch.randint(0, 3, (8,)))
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _fault(
        "rate_from_zero",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
o = torch.optim.AdamW(m.parameters(), lr=3e-3)
s = torch.optim.lr_scheduler.LambdaLR(o, lambda e: min(1.0, max(0, e - 2) / 8))
for i in range(14):
    x = torch.randn(8, 6); loss = F.mse_loss(m(x), x[:, :1])
    o.zero_grad(); loss.backward(); o.step(); s.step()
""",
    ),
    _fault(
        "large_rate_of_a_bounded_loss",
        """
m = nn.Linear(6, 1)
o = torch.optim.SGD(m.parameters(), lr=8.0)
for i in range(20):
    x = torch.randn(64, 6); y = (x[:, :1] + 0.3 * torch.randn(64, 1) > 0).float()
    loss = F.binary_cross_entropy_with_logits(m(x), y)
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _fault(
        "restarts_from_nothing",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
o = torch.optim.SGD(m.parameters(), lr=0.05)
s = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=6, eta_min=0)
for i in range(20):
    for g in o.param_groups:
        g["lr"] = max(g["lr"], 1e-12) if i % 6 else g["lr"]
    x = torch.randn(16, 6); loss = F.mse_loss(m(x), x[:, :1])
    o.zero_grad(); loss.backward(); o.step(); s.step()
""",
    ),
    _fault(
        "rate_in_two_stages",
        """
body, head = nn.Linear(6, 12), nn.Linear(12, 1)
o = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-8)
for i in range(14):
    for g in o.param_groups:
        g["lr"] = 1e-8 if i < 5 else 1e-3
    x = torch.randn(16, 6); loss = F.mse_loss(head(torch.relu(body(x))), x[:, :1])
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _fault(
        "rewards_of_a_policy",
        """
p = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
o = torch.optim.Adam(p.parameters(), lr=1e-2)
for i in range(16):
    s = torch.randn(32, 4)
    gone = torch.tensor([False, False, i % 2 == 0])
    d = torch.distributions.Categorical(logits=p(s).masked_fill(gone, -1e9))
    a = d.sample(); r = (a == 0).float() * 100 * torch.rand(32)
    adv = (r - r.mean()) / (r.std() + 1e-6)
    loss = -(d.log_prob(a) * adv).mean() - 0.01 * d.entropy().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
]
