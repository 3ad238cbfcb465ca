"""Nora once more, in float64 NumPy with rows along the last axis: what the tests compare with."""

import numpy as np


def project(h, w):
    """Rows of h without their part along the rows of w; as they are where w is 0."""
    ww = np.sum(w * w, axis=-1, keepdims=True)
    along = np.divide(np.sum(h * w, axis=-1, keepdims=True), ww, out=0 * ww, where=ww > 0)
    return h - along * w


def normalize(h):
    """Rows of h at length 1; 0 where they are 0."""
    norm = np.linalg.norm(h, axis=-1, keepdims=True)
    return np.divide(h, norm, out=np.zeros_like(h), where=norm > 0)


def direction(h, w):
    return normalize(project(h, w))


def rho(h, w):
    """|u| / |h| of each row: what is left of it when its part along w is gone."""
    norms = np.linalg.norm(project(h, w), axis=-1), np.linalg.norm(h, axis=-1)
    return np.divide(*norms, out=np.zeros_like(norms[0]), where=norms[1] > 0)


def steps(w, grads, *, lr, beta=0.95, ahead=None, weight_decay=0.0, scale=1.0):
    """Weights after each step, and the last momentum."""
    ahead = beta if ahead is None else ahead
    w, mu, weights = np.float64(w), np.zeros(np.shape(w)), []
    for g in np.float64(grads):
        mu = beta * mu + (1 - beta) * g
        d = direction(ahead * mu + (1 - ahead) * g, w)
        w = w - lr * (scale * d + weight_decay * w)
        weights.append(w)
    return np.stack(weights), mu


def rows_last(x, reduction, output):
    """The rows of an array along one last axis: (batch..., output, fan-in)."""
    x = np.asarray(x)
    batch = [axis for axis in range(x.ndim) if axis not in (*reduction, *output)]
    x = np.transpose(x, (*batch, *output, *reduction))
    shape = x.shape[: len(batch)]
    fan_out = int(np.prod(x.shape[len(batch) : len(batch) + len(output)]))
    fan_in = int(np.prod(x.shape[len(batch) + len(output) :]))
    return x.reshape(*shape, fan_out, fan_in)
