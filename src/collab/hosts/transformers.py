"""Attention classes of Hugging Face transformers as data. To add one, see docs/adding-a-host.md.

A row names classes that differ in nothing but their name. `folder.Class` names a class whose name several of
transformers' modules use for different things. What is not a row is a function that a row needs: it tells where
the inputs, the mask or an addend to the scores of a class come from. Importing this file registers all rows.
"""

from collab.hosts import transformers_bert, transformers_decoders, transformers_vision

__all__ = ["transformers_bert", "transformers_decoders", "transformers_vision"]
