"""What the ranks that are left do after a loss, with ``on_lost_rank="finish"``.

No core and no runner knows of it. The pipeline aborts as ever; the loops of the ranks that are left hold a roll call
over the rendezvous, and come to one decision. A step that no rank has completed is run again, from its start, by the
replicas that are whole: in a smaller pipeline, which has the same modules. Since parameters have not changed since the
step began, and random numbers belong to microbatches, its gradients are those of the step.
"""
