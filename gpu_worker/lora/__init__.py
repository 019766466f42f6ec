"""LoRA adapters: which products they add to, what one holds, and the slots of those that are served."""
