"""The worker: weights, KV pages, persistent rows and sampler state of one device.

It owns what a step needs on the device and does exactly what each StepPlan says, in order. It talks to the scheduler
alone, over one DEALER socket; of a replica of several processes one does, and passes on to the others what it is told
(``group_link.py``). It never decides what runs next, which block is whose or when a sequence ends, never
sees text, and is the only package that imports torch.
"""
