"""The engine: options, requests, scheduler, packing, runner, and the offline API."""
