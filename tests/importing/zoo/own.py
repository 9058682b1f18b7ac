"""Modules as repositories and tutorials have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-05)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size, bias, flash, dropout):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = (n_head, n_embd, dropout, flash)
        if not flash:
            self.register_buffer(
                "bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
            )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
        else:
            att = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTMLP(nn.Module):
    def __init__(self, n_embd, bias, dropout):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, block_size, bias, flash, dropout):
        super().__init__()
        self.ln_1 = LayerNorm(n_embd, bias)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size, bias, flash, dropout)
        self.ln_2 = LayerNorm(n_embd, bias)
        self.mlp = GPTMLP(n_embd, bias, dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(
        self, vocab_size=67, block_size=16, n_layer=3, n_head=4, n_embd=32, bias=True, flash=True, dropout=0.0
    ):
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(n_embd, n_head, block_size, bias, flash, dropout) for _ in range(n_layer)]),
                "ln_f": LayerNorm(n_embd, bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        device = idx.device
        _b, t = idx.size()
        assert t <= self.block_size
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return (logits, loss)


class Bottleneck(nn.Module):
    def __init__(self, cin, mid, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv2 = nn.Conv2d(mid, mid, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(mid)
        self.conv3 = nn.Conv2d(mid, cout, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(8, 8, 32), Bottleneck(32, 8, 32))
        self.layer2 = nn.Sequential(Bottleneck(32, 16, 64, 2), Bottleneck(64, 16, 64))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(64, 10)

    def forward(self, x, label):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = torch.flatten(self.avgpool(x), 1)
        x = self.fc(x)
        return (x, F.cross_entropy(x, label))


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.temb = nn.Linear(temb, cout)
        self.norm2 = nn.GroupNorm(4, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.temb(F.silu(t))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class SpatialAttention(nn.Module):
    def __init__(self, c, heads=2):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.qkv = nn.Conv2d(c, 3 * c, 1)
        self.proj = nn.Conv2d(c, c, 1)
        self.heads = heads

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).permute(1, 0, 2, 4, 3).unbind(0)
        )
        a = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(a.transpose(2, 3).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.temb = nn.Sequential(nn.Linear(ch, 4 * ch), nn.SiLU(), nn.Linear(4 * ch, 4 * ch))
        self.ch = ch
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.down1 = ResBlock(ch, ch, 4 * ch)
        self.downsample = nn.Conv2d(ch, 2 * ch, 3, stride=2, padding=1)
        self.down2 = ResBlock(2 * ch, 2 * ch, 4 * ch)
        self.mid_attn = SpatialAttention(2 * ch)
        self.mid = ResBlock(2 * ch, 2 * ch, 4 * ch)
        self.up2 = ResBlock(4 * ch, 2 * ch, 4 * ch)
        self.upconv = nn.Conv2d(2 * ch, ch, 3, padding=1)
        self.up1 = ResBlock(2 * ch, ch, 4 * ch)
        self.norm_out = nn.GroupNorm(4, ch)
        self.conv_out = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x, t, noise):
        e = self.temb(timestep_embedding(t, self.ch))
        h1 = self.down1(self.conv_in(x), e)
        h2 = self.down2(self.downsample(h1), e)
        h = self.mid(self.mid_attn(h2), e)
        h = self.up2(torch.cat([h, h2], dim=1), e)
        h = self.upconv(F.interpolate(h, scale_factor=2, mode="nearest"))
        h = self.up1(torch.cat([h, h1], dim=1), e)
        out = self.conv_out(F.silu(self.norm_out(h)))
        return (out, F.mse_loss(out, noise))


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(d, elementwise_affine=False, eps=1e-06)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.heads = heads
        self.norm2 = nn.LayerNorm(d, elementwise_affine=False, eps=1e-06)
        self.fc1 = nn.Linear(d, 4 * d)
        self.fc2 = nn.Linear(4 * d, d)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x, c):
        s1, c1, g1, s2, c2, g2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + g1.unsqueeze(1) * self.attn(modulate(self.norm1(x), s1, c1))
        x = x + g2.unsqueeze(1) * self.fc2(F.gelu(self.fc1(modulate(self.norm2(x), s2, c2)), approximate="tanh"))
        return x


class DiT(nn.Module):
    def __init__(self, size=8, patch=2, chans=4, d=32, depth=3, heads=4, classes=11):
        super().__init__()
        self.x_embedder = nn.Conv2d(chans, d, patch, patch)
        self.t_mlp = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))
        self.d = d
        self.patch = patch
        self.chans = chans
        self.y_embedder = nn.Embedding(classes, d)
        n = (size // patch) ** 2
        self.pos_embed = nn.Parameter(torch.randn(1, n, d), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(d, heads) for _ in range(depth)])
        self.norm_final = nn.LayerNorm(d, elementwise_affine=False, eps=1e-06)
        self.linear = nn.Linear(d, patch * patch * chans)
        self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(d, 2 * d))

    def unpatchify(self, x):
        c, p = (self.chans, self.patch)
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], h, w, p, p, c)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(x.shape[0], c, h * p, h * p)

    def forward(self, x, t, y, noise):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_mlp(timestep_embedding(t, self.d)) + self.y_embedder(y)
        for b in self.blocks:
            x = b(x, c)
        shift, scale = self.adaLN(c).chunk(2, dim=1)
        x = self.unpatchify(self.linear(modulate(self.norm_final(x), shift, scale)))
        return (x, F.mse_loss(x, noise))


class LSTMLM(nn.Module):
    def __init__(self, vocab=67, d=32, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.lstm = nn.LSTM(d, d, layers, batch_first=True)
        self.head = nn.Linear(d, vocab)

    def forward(self, tokens, targets):
        h, _ = self.lstm(self.emb(tokens))
        logits = self.head(h)
        return (logits, F.cross_entropy(logits.transpose(1, 2), targets))


class Tower(nn.Module):
    def __init__(self, sizes, d, dense, out):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(s, d) for s in sizes])
        self.mlp = nn.Sequential(nn.Linear(len(sizes) * d + dense, 64), nn.ReLU(), nn.Linear(64, out))

    def forward(self, ids, dense):
        x = torch.cat([t(ids[:, i]) for i, t in enumerate(self.tables)] + [dense], dim=-1)
        return F.normalize(self.mlp(x), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = Tower([101, 53, 7], 16, 5, 24)
        self.item = Tower([211, 19], 16, 3, 24)
        self.temp = nn.Parameter(torch.tensor(2.0))

    def forward(self, user_ids, user_dense, item_ids, item_dense):
        u, i = (self.user(user_ids, user_dense), self.item(item_ids, item_dense))
        logits = u @ i.t() * self.temp.exp()
        return (logits, F.cross_entropy(logits, torch.arange(logits.size(0), device=logits.device)))


class TorchEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(67, 32)
        self.pos = nn.Parameter(torch.randn(1, 64, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 67)

    def forward(self, tokens, targets):
        x = self.emb(tokens) + self.pos[:, : tokens.shape[1]]
        x = self.enc(x)
        logits = self.head(x)
        return (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class TorchEncoderMasked(TorchEncoder):
    def forward(self, tokens, targets):
        x = self.emb(tokens) + self.pos[:, : tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.enc(x, mask=mask, is_causal=True)
        logits = self.head(x)
        return (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class MHA(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(67, 32)
        self.att = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 67)

    def forward(self, tokens, targets):
        x = self.emb(tokens)
        y, _ = self.att(x, x, x, need_weights=False)
        logits = self.head(x + y)
        return (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class GRULM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(67, 32)
        self.rnn = nn.GRU(32, 48, 2, batch_first=True)
        self.head = nn.Linear(48, 67)

    def forward(self, tokens, targets):
        h, _ = self.rnn(self.emb(tokens))
        logits = self.head(h)
        return (logits, F.cross_entropy(logits.transpose(1, 2), targets))


class ConvNeXtBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.dwconv = nn.Conv2d(d, d, 7, padding=3, groups=d)
        self.norm = nn.LayerNorm(d, eps=1e-06)
        self.pwconv1 = nn.Linear(d, 4 * d)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * d, d)
        self.gamma = nn.Parameter(0.01 * torch.ones(d))

    def forward(self, x):
        i = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv2(self.act(self.pwconv1(x)))
        x = self.gamma * x
        return i + x.permute(0, 3, 1, 2)


class LN2d(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))
        self.eps = 1e-06

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        v = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(v + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        d = [8, 16]
        self.stem = nn.Sequential(nn.Conv2d(3, d[0], 4, 4), LN2d(d[0]))
        self.stages = nn.ModuleList([nn.Sequential(*[ConvNeXtBlock(k) for _ in range(2)]) for k in d])
        self.down = nn.Sequential(LN2d(d[0]), nn.Conv2d(d[0], d[1], 2, 2))
        self.norm = nn.LayerNorm(d[1], eps=1e-06)
        self.head = nn.Linear(d[1], 10)

    def forward(self, image, label):
        x = self.stages[0](self.stem(image))
        x = self.stages[1](self.down(x))
        x = self.norm(x.mean([-2, -1]))
        logits = self.head(x)
        return (logits, F.cross_entropy(logits, label))


class MixerBlock(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.n1 = nn.LayerNorm(d)
        self.tok = nn.Sequential(nn.Linear(n, 24), nn.GELU(), nn.Linear(24, n))
        self.n2 = nn.LayerNorm(d)
        self.ch = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(*[MixerBlock(16, 32) for _ in range(3)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, image, label):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x)).mean(1)
        logits = self.head(x)
        return (logits, F.cross_entropy(logits, label))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(20, 32), nn.ReLU())
        self.mu = nn.Linear(32, 6)
        self.lv = nn.Linear(32, 6)
        self.dec = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, x, noise):
        h = self.enc(x)
        mu, lv = (self.mu(h), self.lv(h))
        z = mu + noise * torch.exp(0.5 * lv)
        y = self.dec(z)
        kl = -0.5 * torch.sum(1 + lv - mu.pow(2) - lv.exp()) / x.shape[0]
        return (y, F.mse_loss(y, x) + 0.01 * kl)


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-05):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


def precompute(dim, end, theta=10000.0):
    f = 1.0 / theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim)
    t = torch.arange(end)
    f = torch.outer(t, f).float()
    return (torch.cos(f), torch.sin(f))


def reshape_b(f, x):
    return f.view([d if i == 1 or i == x.ndim - 1 else 1 for i, d in enumerate(x.shape)])


def rot(xq, xk, c, sine):
    xqr, xqi = xq.float().reshape((*xq.shape[:-1], -1, 2)).unbind(-1)
    xkr, xki = xk.float().reshape((*xk.shape[:-1], -1, 2)).unbind(-1)
    c = reshape_b(c, xqr)
    sine = reshape_b(sine, xqr)
    q = torch.stack([xqr * c - xqi * sine, xqr * sine + xqi * c], -1).flatten(3)
    k = torch.stack([xkr * c - xki * sine, xkr * sine + xki * c], -1).flatten(3)
    return (q.type_as(xq), k.type_as(xk))


def repeat_kv(x, n):
    b, t, h, d = x.shape
    if n == 1:
        return x
    return x[:, :, :, None, :].expand(b, t, h, n, d).reshape(b, t, h * n, d)


class L2Attention(nn.Module):
    def __init__(self, dim=32, heads=4, kv=2):
        super().__init__()
        self.h, self.kv, self.d = (heads, kv, dim // heads)
        self.wq = nn.Linear(dim, heads * self.d, bias=False)
        self.wk = nn.Linear(dim, kv * self.d, bias=False)
        self.wv = nn.Linear(dim, kv * self.d, bias=False)
        self.wo = nn.Linear(heads * self.d, dim, bias=False)
        m = torch.full((1, 1, 64, 64), float("-inf"))
        self.register_buffer("mask", torch.triu(m, diagonal=1), persistent=False)

    def forward(self, x, c, n):
        b, t, _ = x.shape
        xq, xk, xv = (self.wq(x), self.wk(x), self.wv(x))
        xq = xq.view(b, t, self.h, self.d)
        xk = xk.view(b, t, self.kv, self.d)
        xv = xv.view(b, t, self.kv, self.d)
        xq, xk = rot(xq, xk, c, n)
        xk = repeat_kv(xk, self.h // self.kv)
        xv = repeat_kv(xv, self.h // self.kv)
        xq = xq.transpose(1, 2)
        xk = xk.transpose(1, 2)
        xv = xv.transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.d)
        scores = scores + self.mask[:, :, :t, :t]
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        out = torch.matmul(scores, xv)
        return self.wo(out.transpose(1, 2).contiguous().view(b, t, -1))


class L2FF(nn.Module):
    def __init__(self, d=32, h=88):
        super().__init__()
        self.w1 = nn.Linear(d, h, bias=False)
        self.w2 = nn.Linear(h, d, bias=False)
        self.w3 = nn.Linear(d, h, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class L2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = L2Attention()
        self.feed_forward = L2FF()
        self.attention_norm = RMSNorm(32)
        self.ffn_norm = RMSNorm(32)

    def forward(self, x, c, n):
        h = x + self.attention(self.attention_norm(x), c, n)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama2C(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(67, 32)
        self.layers = nn.ModuleList([L2Block() for _ in range(3)])
        self.norm = RMSNorm(32)
        self.output = nn.Linear(32, 67, bias=False)
        self.tok_embeddings.weight = self.output.weight
        c, n = precompute(8, 64)
        self.register_buffer("freqs_cos", c, persistent=False)
        self.register_buffer("freqs_sin", n, persistent=False)

    def forward(self, tokens, targets):
        _b, t = tokens.shape
        h = self.tok_embeddings(tokens)
        c, n = (self.freqs_cos[:t], self.freqs_sin[:t])
        for layer in self.layers:
            h = layer(h, c, n)
        logits = self.output(self.norm(h))
        return (logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1))


class ALiBi(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(67, 32)
        self.qkv = nn.Linear(32, 96)
        self.o = nn.Linear(32, 67)

    def forward(self, tokens, targets):
        x = self.emb(tokens)
        B, L, C = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, 4, 8).permute(2, 0, 3, 1, 4)
        slopes = torch.tensor([2 ** (-2 * (i + 1)) for i in range(4)])
        d = torch.arange(L)[None, :] - torch.arange(L)[:, None]
        bias = slopes[:, None, None] * d
        att = q @ k.transpose(-1, -2) * 8 ** (-0.5) + bias
        att = att.masked_fill(torch.triu(torch.ones(L, L, dtype=torch.bool), 1), float("-inf")).softmax(-1)
        logits = self.o((att @ v).transpose(1, 2).reshape(B, L, C))
        return (logits, F.cross_entropy(logits.view(-1, 67), targets.view(-1)))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, y):
        out = self.net(x).squeeze(-1)
        return (out, F.mse_loss(out, y))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 7 * 7, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x, y):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        logits = self.fc2(F.relu(self.fc1(x)))
        return (logits, F.cross_entropy(logits, y))


class CrossAtt(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.kv = nn.Linear(24, 32)
        self.o = nn.Linear(16, 1)

    def forward(self, x, memory, mask, y):
        B, L, C = x.shape
        S = memory.shape[1]
        q = self.q(x).view(B, L, 2, 8).transpose(1, 2)
        k, v = self.kv(memory).view(B, S, 2, 2, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        out = self.o(a.transpose(1, 2).reshape(B, L, C)).squeeze(-1)
        return (out, F.mse_loss(out, y))


def ids(batch: int, length: int, limit: int = 67) -> Tensor:
    return torch.randint(0, limit, (batch, length))


def _tokens() -> dict[str, Tensor]:
    return {"tokens": ids(3, 10), "targets": ids(3, 10)}


def _images() -> dict[str, Tensor]:
    return {"image": torch.randn(3, 3, 16, 16), "label": torch.randint(0, 10, (3,))}


class Attention(nn.Module):
    """Additive attention, of a decoder's state to what the encoder has made (Bahdanau et al., arXiv 1409.0473)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_state = nn.Linear(hidden, hidden)
        self.of_source = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, state: Tensor, source: Tensor) -> Tensor:
        energy = self.score(torch.tanh(self.of_state(state).unsqueeze(1) + self.of_source(source))).squeeze(-1)
        weights = F.softmax(energy, dim=1)
        return torch.bmm(weights.unsqueeze(1), source).squeeze(1)


class Seq2Seq(nn.Module):
    def __init__(self, words: int = 15, out_words: int = 13, embed: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.source = nn.Embedding(words, embed)
        self.target = nn.Embedding(out_words, embed)
        self.encoder = nn.GRU(embed, hidden, batch_first=True)
        self.attention = Attention(hidden)
        self.cell = nn.GRUCell(embed + hidden, hidden)
        self.out = nn.Linear(hidden, out_words)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        memory, last = self.encoder(self.source(source))
        state = last[-1]
        given = self.target(target)
        outputs = []
        for t in range(target.size(1)):
            context = self.attention(state, memory)
            state = self.cell(torch.cat([given[:, t], context], dim=1), state)
            outputs.append(self.out(state))
        logits = torch.stack(outputs, dim=1)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# What makes a module, and its example inputs.
MODULES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "mlp": (MLP, lambda: {"x": torch.randn(3, 12), "y": torch.randn(3)}),
    "cnn": (CNN, lambda: {"x": torch.randn(3, 1, 28, 28), "y": torch.randint(0, 10, (3,))}),
    "transformer_encoder": (TorchEncoder, _tokens),
    "transformer_encoder_masked": (TorchEncoderMasked, _tokens),
    "multihead_attention": (MHA, _tokens),
    "gru": (GRULM, _tokens),
    "convnext": (ConvNeXt, _images),
    "mixer": (Mixer, _images),
    "vae": (VAE, lambda: {"x": torch.randn(3, 20), "noise": torch.randn(3, 6)}),
    "llama2c": (Llama2C, _tokens),
    "alibi": (ALiBi, _tokens),
    "cross_attention": (
        CrossAtt,
        lambda: {
            "x": torch.randn(3, 6, 16),
            "memory": torch.randn(3, 9, 24),
            "mask": torch.rand(3, 9) > 0.2,
            "y": torch.randn(3, 6),
        },
    ),
    "nanogpt": (GPT, lambda: {"idx": ids(3, 10), "targets": ids(3, 10)}),
    "nanogpt_masked": (lambda: GPT(flash=False), lambda: {"idx": ids(3, 10), "targets": ids(3, 10)}),
    "nanogpt_dropout": (lambda: GPT(flash=False, dropout=0.1), lambda: {"idx": ids(3, 10), "targets": ids(3, 10)}),
    "resnet": (ResNet, lambda: {"x": torch.randn(3, 3, 32, 32), "label": torch.randint(0, 10, (3,))}),
    "unet": (
        UNet,
        lambda: {"x": torch.randn(3, 3, 8, 8), "t": torch.rand(3) * 100, "noise": torch.randn(3, 3, 8, 8)},
    ),
    "dit": (
        DiT,
        lambda: {
            "x": torch.randn(3, 4, 8, 8),
            "t": torch.rand(3) * 100,
            "y": torch.randint(0, 11, (3,)),
            "noise": torch.randn(3, 4, 8, 8),
        },
    ),
    "lstm": (LSTMLM, _tokens),
    "seq2seq": (Seq2Seq, lambda: {"source": ids(3, 6, 15), "target": ids(3, 5, 13), "labels": ids(3, 5, 13)}),
    "two_tower": (
        TwoTower,
        lambda: {
            "user_ids": ids(3, 3, 7),
            "user_dense": torch.randn(3, 5),
            "item_ids": ids(3, 2, 19),
            "item_dense": torch.randn(3, 3),
        },
    ),
}
