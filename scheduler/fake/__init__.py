"""A worker without a model that speaks the real protocol: the scheduler's tests and its benchmark run on it."""
