"""Federated learning in few bits."""
