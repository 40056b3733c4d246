"""Retrain, replay or simulate: what each takes, which question it answers, and which is the cheapest."""
