"""The pieces of a step that are not the model: what the host sends, what is made of it once per step, the sampler."""
