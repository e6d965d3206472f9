"""Healthy training scripts that look ill to a hasty doctor."""

from tests.doctor.zoo import Script

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nimport halfstep as hs\n"


def _script(name, body, steps=20):
    return Script(name, HEAD + body, steps=steps)


SCRIPTS = [
    _script(
        "plain",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
o = torch.optim.SGD(m.parameters(), lr=1e-2)
for i in range(15):
    loss = m(torch.randn(8, 6)).square().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _script(
        "start_up_skips",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
o = torch.optim.Adam(m.parameters(), lr=1e-3)
s = torch.amp.GradScaler("cpu", init_scale=2.0**26)
for i in range(20):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (m(torch.randn(8, 6)).float() - 1).square().mean()
    o.zero_grad(); s.scale(loss).backward(); s.step(o); s.update()
""",
    ),
    _script(
        "start_up_skips_of_a_session",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
o = torch.optim.AdamW(m.parameters(), lr=1e-3)
amp = hs.prepare(m, o, level="O2", dtype="fp16", loss_scale=hs.DynamicLossScale(2.0**24))
for i in range(20):
    with amp.autocast():
        loss = (m(torch.randn(8, 6)).float() - 1).square().mean()
    amp.backward(loss); amp.step()
""",
    ),
    _script(
        "causal_mask",
        """
class Attn(nn.Module):
    def __init__(self):
        super().__init__(); self.q = nn.Linear(8, 24)
    def forward(self, x):
        q, k, v = self.q(x).chunk(3, -1)
        mask = torch.triu(torch.full((x.shape[1],) * 2, float("-inf")), 1)
        return torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + mask, -1) @ v
m = nn.Sequential(Attn(), nn.LayerNorm(8), nn.Linear(8, 2))
o = torch.optim.AdamW(m.parameters(), lr=1e-3)
for i in range(8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = m(torch.randn(2, 5, 8)).float().square().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _script(
        "gan",
        """
g, d = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
og, od = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=1e-3)
bce = nn.BCEWithLogitsLoss()
for i in range(8):
    x, z = torch.randn(8, 4), torch.randn(8, 3)
    od.zero_grad()
    (bce(d(x), torch.ones(8, 1)) + bce(d(g(z).detach()), torch.zeros(8, 1))).backward(); od.step()
    og.zero_grad(); bce(d(g(z)), torch.ones(8, 1)).backward(); og.step()
""",
    ),
    _script(
        "missing_values_are_masked",
        """
m = nn.Linear(5, 1)
o = torch.optim.SGD(m.parameters(), lr=1e-2)
for i in range(8):
    x = torch.randn(8, 5)
    x[torch.rand(8, 5) < 0.2] = float("nan")
    x = torch.where(torch.isnan(x), torch.zeros_like(x), x)
    loss = m(x).square().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _script(
        "missing_targets_are_masked",
        """
m = nn.Linear(5, 1)
o = torch.optim.SGD(m.parameters(), lr=1e-2)
for i in range(8):
    x = torch.randn(8, 5); y = x[:, :1].clone(); y[3] = float("nan")
    keep = ~torch.isnan(y)
    loss = F.mse_loss(m(x)[keep], y[keep])
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _script(
        "low_rank_adapters",
        """
class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(8, 2)); self.b = nn.Parameter(torch.zeros(2, 8))
    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b
m = nn.Sequential(Lora(), nn.Linear(8, 1))
o = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
amp = hs.prepare(m, o, dtype="bf16")
for i in range(8):
    with amp.autocast():
        loss = (m(torch.randn(8, 8)).float() - 1).square().mean()
    amp.backward(loss); amp.step()
""",
    ),
    _script(
        "warm_up",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
o = torch.optim.AdamW(m.parameters(), lr=1e-2)
s = torch.optim.lr_scheduler.LambdaLR(o, lambda e: min(1.0, 1e-6 + e / 10))
for i in range(14):
    loss = m(torch.randn(8, 6)).square().mean()
    o.zero_grad(); loss.backward(); o.step(); s.step()
""",
    ),
    _script(
        "workers",
        """
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    m = nn.Linear(4, 1)
    o = torch.optim.SGD(m.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    for epoch in range(2):
        for x, y in DataLoader(data, batch_size=8, num_workers=1, shuffle=True):
            loss = F.mse_loss(m(x), y)
            o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _script(
        "compiled_and_checkpointed",
        """
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.b(checkpoint(lambda t: torch.relu(self.a(t)), x, use_reentrant=False))
m = Net(); run = torch.compile(m, backend="eager")
o = torch.optim.SGD(m.parameters(), lr=1e-2)
for i in range(6):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = run(torch.randn(8, 4)).float().square().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _script(
        "line_search",
        """
m = nn.Linear(4, 1)
o = torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=4)
x, y = torch.randn(32, 4), torch.randn(32, 1)
def closure():
    o.zero_grad(); loss = F.mse_loss(m(x), y); loss.backward(); return loss
for i in range(5):
    o.step(closure)
""",
    ),
    _script(
        "line_search_at_its_end",
        """
m = nn.Linear(4, 1)
o = torch.optim.LBFGS(m.parameters())
x, y = torch.randn(32, 4), torch.randn(32, 1)
def closure():
    o.zero_grad(); loss = F.mse_loss(m(x), y); loss.backward(); return loss
for i in range(20):
    o.step(closure)
""",
    ),
    _script(
        "accumulated_and_clipped",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 3))
o = torch.optim.AdamW(m.parameters(), lr=1e-3)
amp = hs.prepare(m, o, level="O2", dtype="bf16")
for i in range(7):
    for _ in range(3):
        with amp.autocast():
            loss = F.cross_entropy(m(torch.randn(8, 6)).float(), torch.randint(0, 3, (8,))) / 3
        amp.backward(loss)
    amp.step(clip_norm=1.0)
""",
    ),
    _script(
        "large_inputs_that_are_normalised",
        """
m = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
o = torch.optim.SGD(m.parameters(), lr=1e-2)
for i in range(8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = m(torch.randn(16, 6) * 1e6 + 1e5).float().square().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _script(
        "sparse_embedding",
        """
e = nn.Embedding(50, 8, sparse=True); h = nn.Linear(8, 2)
o = torch.optim.SparseAdam(e.parameters(), lr=1e-2); p = torch.optim.Adam(h.parameters(), lr=1e-2)
for i in range(7):
    t = torch.randint(0, 50, (6, 4))
    loss = F.cross_entropy(h(e(t).mean(1)), torch.randint(0, 2, (6,)))
    o.zero_grad(); p.zero_grad(); loss.backward(); o.step(); p.step()
""",
    ),
    _script(
        "frozen_then_thawed",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
m[0].requires_grad_(False)
o = torch.optim.Adam(m.parameters(), lr=1e-3)
for i in range(10):
    if i == 5: m[0].requires_grad_(True)
    loss = m(torch.randn(8, 6)).square().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
    _script(
        "session_in_16_bits_throughout",
        """
m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
amp = hs.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), level="O3", dtype="bf16")
for i in range(12):
    x = torch.randn(32, 6)
    with amp.autocast():
        loss = (m(x).float() - x[:, :1]).square().mean()
    amp.backward(loss); amp.step()
""",
    ),
    _script(
        "wasserstein_with_a_penalty",
        """
c = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
o = torch.optim.RMSprop(c.parameters(), lr=1e-3)
for i in range(8):
    x, f = torch.randn(8, 4), torch.randn(8, 4) * 2
    u = torch.rand(8, 1); mid = (u * x + (1 - u) * f).requires_grad_()
    g, = torch.autograd.grad(c(mid).sum(), mid, create_graph=True)
    loss = c(f).mean() - c(x).mean() + 10 * (g.norm(dim=-1) - 1).square().mean()
    o.zero_grad(); loss.backward(); o.step()
""",
    ),
]
