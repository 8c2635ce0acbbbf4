"""Integrations of training frameworks; `import quantshard` imports none of them."""
