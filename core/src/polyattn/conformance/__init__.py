"""The conformance kit: tests a backend for everything that it claims, against the reference.

    pytest --pyargs polyattn.conformance --polyattn-backend NAME

Cases follow from the backend's `Capabilities`: each claim is tested, and what isn't claimed must be
refused with a `Rejection`.
"""
