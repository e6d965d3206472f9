"""A loss that overflows fp16: the Gram matrix of features that nobody scaled."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import halfstep as hs


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(64, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        features = F.relu(self.encoder(x))
        return self.head(features), features.T @ features


torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data).float(), torch.tensor(digits.target)
model = Features()
amp = hs.prepare(model, hs.optim.AdamW(model.parameters(), lr=3e-3), level="O1", dtype="fp16")

for _ in range(20):
    rows = torch.randint(len(x), (1024,))
    with amp.autocast():
        logits, gram = model(x[rows])
        loss = F.cross_entropy(logits, y[rows]) + 1e-12 * gram.float().square().mean()
    amp.backward(loss)
    amp.step()
