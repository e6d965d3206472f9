"""`apex.parallel` names over torch's own: wrap a model after `amp.initialize`."""

from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

convert_syncbn_model = SyncBatchNorm.convert_sync_batchnorm

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]
