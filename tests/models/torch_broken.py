"""Modules of PyTorch that cannot be trained as they are, one function each.

The line at fault ends in `# here`; the docstring is the code that says so.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

X, Y = torch.randn(8, 16), torch.randint(0, 4, (8,))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)


def branch_on_a_value():
    """SW_TORCH_VALUES"""

    class Net(Base):
        def forward(self, x):
            y = self.fc(x)
            if y.sum() > 0:  # here
                y = y * 2
            return y

    return Net(), F.cross_entropy, (X, Y)


def loop_on_a_value():
    """SW_TORCH_VALUES"""

    class Net(Base):
        def forward(self, x):
            y = self.fc(x)
            while y.abs().max() > 1:  # here
                y = y / 2
            return y

    return Net(), F.cross_entropy, (X, Y)


def item():
    """SW_TORCH_VALUES"""

    class Net(Base):
        def forward(self, x):
            y = self.fc(x)
            return y * math.sqrt(y.abs().mean().item())  # here

    return Net(), F.cross_entropy, (X, Y)


def rows_of_a_mask():
    """SW_TORCH_VALUES"""

    class Net(Base):
        def forward(self, x):
            y = self.fc(x)
            return y[y[:, 0] > 0].sort(0).values.mean()  # here

    return Net(), X


def nonzero():
    """SW_TORCH_VALUES"""

    class Net(Base):
        def forward(self, x):
            return self.fc(x).sum() + torch.nonzero(x).sort(0).values.sum()  # here

    return Net(), X


def to_numpy():
    """SW_TORCH_VALUES"""

    class Net(Base):
        def forward(self, x):
            scale = float(x.detach().numpy().max())  # here
            return self.fc(x).mean() * scale

    return Net(), X


def slice_to_a_value():
    """SW_TORCH_VALUES"""

    class Net(Base):
        def forward(self, x, lengths):
            y = self.fc(x)
            return sum(y[i, : lengths[i]].sum() for i in range(8))  # here

    return Net(), (X, torch.randint(1, 4, (8,)))


def fourier():
    """SW_TORCH_TYPE"""

    class Net(Base):
        def forward(self, x):
            return self.fc(torch.fft.fft(x).abs()).mean()  # here

    return Net(), X


def complex_weights():
    """SW_TORCH_TYPE"""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.w).abs().mean()

    return Net(), X


def no_such_operator():
    """SW_TORCH_OPERATOR"""

    class Net(Base):
        def forward(self, x):
            _, s, _ = torch.linalg.svd(self.fc(x))  # here
            return s.sum()

    return Net(), X


def operator_of_a_library():
    """SW_TORCH_OPERATOR"""

    @torch.library.custom_op("broken::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)

    class Net(Base):
        def forward(self, x):
            return double(self.fc(x)).mean()  # here

    return Net(), X


def loss_per_sample():
    """SW_TORCH_LOSS"""
    return nn.Sequential(nn.Linear(16, 4)), nn.CrossEntropyLoss(reduction="none"), (X, Y)


def no_loss():
    """SW_TORCH_LOSS"""
    return nn.Sequential(nn.Linear(16, 4)), X


def loss_is_a_number():
    """SW_TORCH_LOSS"""
    return nn.Sequential(nn.Linear(16, 4)), lambda output, target: 1.0, (X, Y)


def shapes_that_do_not_fit():
    """SW_TASK_RAISED"""

    class Net(Base):
        def forward(self, x):
            return self.fc(x.view(8, 4, 4)).mean()  # here

    return Net(), X


def targets_that_do_not_fit():
    """SW_TORCH_BATCH"""
    return nn.Sequential(nn.Linear(16, 4)), F.cross_entropy, (X, Y[:5])


def classes_that_do_not_fit():
    """SW_TASK_RAISED"""

    def loss(output, target):
        return F.cross_entropy(output.flatten(), target)  # here

    return nn.Sequential(nn.Linear(16, 4)), loss, (X, Y)


def in_place_on_a_leaf():
    """SW_TASK_RAISED"""

    class Net(Base):
        def forward(self, x):
            self.fc.weight.mul_(0.5)  # here
            return self.fc(x).mean()

    return Net(), X


def name_that_is_not_there():
    """SW_TASK_RAISED"""

    class Net(Base):
        def forward(self, x):
            return self.head(x).mean()  # here

    return Net(), X


def no_batch():
    """SW_TORCH_BATCH"""
    return nn.Sequential(nn.Linear(16, 4)), F.cross_entropy


def batch_of_numbers():
    """SW_TORCH_BATCH"""
    return nn.Sequential(nn.Linear(16, 4)), F.cross_entropy, [1, 2, 3]


def two_batches():
    """SW_TORCH_ENTRY"""
    return nn.Sequential(nn.Linear(16, 4)), F.cross_entropy, (X, Y), {"x": X}


def an_optimizer_without_a_row():
    """SW_TORCH_OPTIMIZER"""
    model = nn.Sequential(nn.Linear(16, 4))
    return model, F.cross_entropy, torch.optim.LBFGS(model.parameters()), (X, Y)


def a_schedule_of_metrics():
    """SW_TORCH_SCHEDULER"""
    model = nn.Sequential(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return model, F.cross_entropy, optimizer, scheduler, (X, Y)


def nothing_is_trained():
    """SW_TASK_PARAMETERS"""
    model = nn.Sequential(nn.Linear(16, 4))
    model.requires_grad_(False)
    return model, F.cross_entropy, (X, Y)
