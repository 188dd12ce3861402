"""Functions of PyTorch that take rows which a mask selects, as training scripts write them.

Each takes hidden states x [3, 4, 8], labels y [3, 4] of which -100 counts not, and a weight w
[8, 5]. Modules are refused with the code of their docstring, at the line that ends in `# here`.
"""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def mean_of_selected(x, y, w):
    return x[y != -100].mean()


def losses_of_selected(x, y, w):
    logits = (x @ w).view(-1, 5)
    losses = F.cross_entropy(logits, y.view(-1), reduction="none")
    return losses[y.view(-1) != -100].mean()


def head_on_selected(x, y, w):
    mask = y != -100
    return F.cross_entropy(F.linear(x[mask], w.T), y[mask])


def masks_computed_twice(x, y, w):
    return F.cross_entropy((x @ w)[y != -100], y[y != -100])


def merged_positions(x, y, w):
    logits, labels = (x @ w).view(-1, 5), y.view(-1)
    return F.cross_entropy(logits[labels != -100], labels[labels != -100], label_smoothing=0.1)


def hidden_and_merged(x, y, w):
    return F.cross_entropy(x[y != -100] @ w, y.view(-1)[y.view(-1) != -100], reduction="sum")


def two_masks(x, y, w):
    return x[y != -100].sum() * x[x.sum(-1) > 0].pow(2).mean()


def mask_of_selected(x, y, w):
    rows = x[y != -100] @ w
    return rows[rows[:, 0] > 0].square().sum()


def nonzero_as_indices(x, y, w):
    places = torch.nonzero(y.view(-1) != -100).squeeze(-1)
    return (x.view(-1, 8)[places] @ w).square().mean()


def where_as_indices(x, y, w):
    sample, position = torch.where(y != -100)
    return (x[sample, position] * (position + sample)[:, None]).mean()


def index_of_selected(x, y, w):
    mask = y != -100
    chances = F.log_softmax(x[mask] @ w, -1)
    return -chances.gather(1, y[mask].unsqueeze(1)).mean()


def masked_select(x, y, w):
    return torch.masked_select(x, x > 0).sqrt().sum()


def none_selected(x, y, w):
    return F.linear(x[y > 100], w.T).square().sum() + w.sum()


def mean_of_none(x, y, w):
    return (x[y > 100] @ w).mean()


def all_selected(x, y, w):
    return torch.log_softmax(x[y > -101] @ w, -1).mean()


def logarithm_of_positive(x, y, w):
    return torch.log(x[x > 0]).mean() + (1 / x[x > 0]).sum()


def written_back(x, y, w):
    mask = y != -100
    z = x * 2
    z[mask] = (x[mask] @ w) @ w.T
    return z.square().mean()


def written_elsewhere(x, y, w):
    z = torch.zeros_like(x)
    z[y.flip(1) != -100] = x[y != -100]
    return (z * x).sum()


def scattered(x, y, w):
    mask = (y.flip(0) != -100).unsqueeze(-1).expand_as(x)
    return (x.masked_scatter(mask, x[y != -100] * 3) * x).sum()


def added_at_indices(x, y, w):
    places = torch.nonzero(y.view(-1) != -100).squeeze(-1)
    found = x.view(-1, 8).index_add(0, places, x.view(-1, 8)[places] * 2)
    return found.square().mean()


def size_as_a_number(x, y, w):
    rows = x[y != -100]
    return (rows @ w).sum() / rows.shape[0] + rows.size(0) * w.mean()


def count_of_elements(x, y, w):
    rows = x[y != -100]
    return rows.square().sum() / (2 * rows.numel() + 1)


def inner_dim(x, y, w):
    return (x[:, y[0] != -100] @ w).amax(1).mean()


def last_dim(x, y, w):
    kept = w[:, 0] > 0
    return (x[..., kept] @ w[kept]).square().mean()


def products_over_rows(x, y, w):
    rows = x[y != -100] @ w
    return torch.linalg.vector_norm(rows.T @ rows) + (rows.T @ x[y != -100]).mean()


def similarities(x, y, w):
    rows = F.normalize(x[y != -100] @ w, dim=-1)
    return F.cross_entropy(rows @ rows.T * 3, torch.arange(rows.shape[0]))


def norms_of_rows(x, y, w):
    rows = F.layer_norm(x[y != -100], (8,)) @ w
    return (rows / rows.norm(dim=-1, keepdim=True)).std()


def attention_over_rows(x, y, w):
    rows = x[y != -100]
    return (torch.softmax(rows @ rows.T, -1) @ rows).square().mean()


def extremes(x, y, w):
    rows = x[y != -100] @ w
    return rows.max(0).values.sum() + rows.min() + rows.amax()


def flattened(x, y, w):
    rows = x[y != -100]
    parts = rows.view(-1, 2, 4).transpose(1, 2).reshape(-1, 2)
    return (parts * parts.flip(1)).mean() + rows.reshape(-1).square().mean()


def behind_others(x, y, w):
    both = torch.cat([x[y != -100], x[0], x[y == 1]])
    return F.mse_loss(both @ w, torch.ones(both.shape[0], 5))


def embedded(x, y, w):
    return (F.embedding(y[y != -100], w.T) * x[y != -100]).mean()


def running_sum(x, y, w):
    return x[y != -100].cumsum(0).square().mean()


def dropped(x, y, w):
    return F.dropout(x[y != -100] @ w, 0.5, training=False).relu().sum()


def variance_over_rows(x, y, w):
    return (x[y != -100] @ w).var(0).sum() + x[y != -100].std()


def chosen_in_rows(x, y, w):
    return torch.where(x[y != -100] > 0, x[y != -100], 0.5).prod(-1).sum()


def fixed_count(x, y, w):
    return (x[torch.arange(4).expand(3, 4) % 2 == 0].view(3, 2, 8) @ w).amax(1).sum()


def accuracy_of_selected(x, y, w):
    mask = y != -100
    logits = (x @ w)[mask]
    return (logits.argmax(-1) == y[mask]).float().mean() + logits.topk(2, -1).values.mean()


def replaced_by_themselves(x, y, w):
    z = x * 2
    z[y != -100] += x[y != -100].sum(0)
    z[:, y[0] != -100] *= 3
    return z.square().mean()


def columns_replaced(x, y, w):
    z = x * 2
    z[:, y[0] != -100] = x[0, 0]
    z[1][:, w[:, 0] > 0] = 0.5
    z[..., w[:, 1] > 0] = z[..., w[:, 1] > 0] + 1
    return (z @ w).square().mean()


def rows_per_expert(x, y, w):
    tokens = x.view(-1, 8)
    chosen = (tokens @ w).argmax(-1)
    out = torch.zeros_like(tokens)
    for expert in range(3):
        (places,) = torch.where(chosen == expert)
        out.index_add_(0, places, torch.tanh(tokens[places] * (expert + 1)) @ w @ w.T)
    return out.square().mean()


def written_per_expert(x, y, w):
    tokens = x.view(-1, 8)
    out = torch.zeros_like(tokens)
    for expert in range(5):
        places = (y.view(-1) == expert).nonzero(as_tuple=True)[0]
        out[places] = tokens[places] * w[:, expert]
    return out.square().mean()


def two_classes(x, y, w):
    mask = y != -100
    target = F.one_hot(y[mask], 5).float()
    return F.binary_cross_entropy_with_logits(x[mask] @ w, target)


def divergence(x, y, w):
    mask = y != -100
    chances = F.log_softmax(x[mask] @ w, -1)
    return F.kl_div(chances, torch.softmax(x[mask][:, :5], -1), reduction="batchmean")


def parts_of_rows(x, y, w):
    rows = x[y != -100]
    a, b = rows.chunk(2, -1)
    first = rows[:, 0].unsqueeze(1).expand(-1, 4)
    both = torch.stack([a * first, b], 1)
    return both.mean((0, 2)).square().sum() + rows.repeat(1, 2).sum() + rows.unbind(1)[3].mean()


def made_for_rows(x, y, w):
    rows = x[y != -100]
    count = rows.shape[0]
    bias = torch.arange(count).unsqueeze(1) / count + rows.new_zeros(count, 8)
    return (rows * (bias + torch.ones(count, 1))).mean()


def packed_attention(x, y, w):
    kept = y != -100
    rows, sample = x[kept], torch.arange(3).unsqueeze(1).expand(3, 4)[kept]
    heads = rows.view(-1, 2, 4).transpose(0, 1)
    scores = heads @ heads.transpose(1, 2) / 2
    is_seen = sample[:, None] == sample[None, :]
    weights = torch.softmax(scores.masked_fill(~is_seen, float("-inf")), -1)
    return (weights @ heads).transpose(0, 1).reshape(-1, 8).mm(w).square().mean()


def half_precision(x, y, w):
    with torch.autocast("cpu", torch.bfloat16):
        rows = x[y != -100].float()
    return F.huber_loss(rows.to(torch.bfloat16).float(), rows * 2, reduction="sum")


def computed_again(x, y, w):
    def head(rows):
        return torch.tanh(rows @ w).sum(-1)

    return torch.utils.checkpoint.checkpoint(head, x[y != -100], use_reentrant=False).mean()


def running_extremes(x, y, w):
    rows = x[y != -100]
    return (rows.amin(0) + rows.prod(0)).sum() + (rows > 0).any(0).sum() * rows.abs().mean()


def contrast_with_others(x, y, w):
    rows = F.normalize(x[y != -100] @ w, dim=-1)
    is_same = torch.eye(rows.shape[0], dtype=torch.bool)
    scores = (rows @ rows.T * 3).masked_fill(is_same, float("-inf"))
    return -torch.log_softmax(scores, -1).masked_fill(is_same, 0).mean()


def pairs_that_are_apart(x, y, w):
    rows = x[y != -100] @ w
    squares = (rows[:, None] - rows[None]).pow(2).sum(-1)
    return squares[squares > 0.1].sqrt().mean()


def rows_of_two_orders(x, y, w):
    return (x[y != -100] * x.flip(0)[y.flip(0) != -100]).sum()


def others_are_no_numbers(x, y, w):
    mask = y != -100
    scaled = x / mask.float().unsqueeze(-1)
    return F.linear(scaled[mask], w.T).square().mean()


def one_class_of_each_row(x, y, w):
    mask = y != -100
    chances = F.log_softmax(x[mask] @ w, -1)
    return -chances[torch.arange(chances.shape[0]), y[mask]].mean()


def replaced_in_rows(x, y, w):
    rows = x[y != -100].clone()
    rows[rows < 0] = 0.5
    return (F.pad(rows, (0, 2))[:, :8] @ w).mean()


def distances(x, y, w):
    mask = y != -100
    a, b = x[mask], x[mask].flip(1)
    near = F.cosine_similarity(a, b, dim=-1).mean() + F.mse_loss(a, b)
    return near + F.l1_loss(a, b, reduction="sum") + F.smooth_l1_loss(a, b)


class SortedRows(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        rows = x[y != -100]
        return (rows.sort(0).values[0] @ w).sum()  # here


class BranchOnSize(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        rows = x[y != -100]
        return rows.sum() if rows.shape[0] > 3 else w.sum()  # here


class FirstRows(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        rows = x[y != -100]
        return (rows[1:] - rows[:-1]).sum()  # here


class Distinct(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        return w.sum() * torch.unique(y).sum()  # here


class Returned(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        return x[y != -100] @ w  # here


class EqualParts(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        return (x[y != -100].reshape(3, -1, 8).amax(1) @ w).sum()  # here


class NormOfBatch(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        rows = x[y != -100]
        return F.batch_norm(rows, w[:, 0], w[:, 1], training=True).square().sum()  # here


class BranchOnAny(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        mask = y != -100
        return x[mask].sum() if mask.any() else w.sum()  # here


class SoftTargets(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        mask = y != -100
        return F.cross_entropy(x[mask] @ w, torch.softmax(x[mask][:, 3:], -1))  # here


class RowsOfSamples(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        chosen = x[(y == 1).any(1)]
        return F.cross_entropy((chosen @ w).transpose(1, 2), y[(y == 1).any(1)])  # here


class LogSumExp(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        return (x[y != -100] @ w).logsumexp(0).sum()  # here


class FusedAttention(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        rows = x[y != -100].view(1, 1, -1, 8)
        return F.scaled_dot_product_attention(rows, rows, rows).sum() * w.sum()  # here


class OwnBackward(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        return (Doubled.apply(x[y != -100]) @ w).sum()  # here


class MaskComputedTwice(torch.nn.Module):
    """SW_TORCH_VALUES"""

    def forward(self, x, y, w):
        return F.mse_loss(x[y != -100], x[y != -100].flip(1)) * w.sum()  # here
