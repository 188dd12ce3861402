"""A U-Net that segments small images (Ronneberger et al. 2015), with group norm."""

import torch
import torch.nn.functional as F
from torch import nn


def double_conv(in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1),
        nn.GroupNorm(4, out_channels),
        nn.SiLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1),
        nn.GroupNorm(4, out_channels),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, in_channels=1, num_classes=3, width=16):
        super().__init__()
        self.down1 = double_conv(in_channels, width)
        self.down2 = double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = double_conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = double_conv(2 * width, width)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        y = self.bottom(self.pool(b))
        y = self.merge2(torch.cat([self.up2(y), b], dim=1))
        y = self.merge1(torch.cat([self.up1(y), a], dim=1))
        return self.head(y)


def dice_and_cross_entropy(logits, target):
    probabilities = logits.softmax(dim=1)
    one_hot = F.one_hot(target, logits.shape[1]).permute(0, 3, 1, 2).float()
    overlap = (probabilities * one_hot).sum(dim=(2, 3))
    total = probabilities.sum(dim=(2, 3)) + one_hot.sum(dim=(2, 3))
    return F.cross_entropy(logits, target) + 1 - ((2 * overlap + 1) / (total + 1)).mean()


def make():
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, masks = torch.randn(32, 1, 16, 16), torch.randint(0, 3, (32, 16, 16))
    return model, dice_and_cross_entropy, optimizer, (images, masks)
