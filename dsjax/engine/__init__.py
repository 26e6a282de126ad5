"""The engine: requests, scheduler, step inputs, sampler, and the offline API."""
