#! /bin/bash
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
python -m torch.distributed.launch --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES \
       pretrain_gpt.py \
       --tensor-model-parallel-size 2 \
       --pipeline-model-parallel-size 2 \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --micro-batch-size 4 \
       --global-batch-size 16 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --data-path "$DATA" \
       --data-impl mmap \
       --lr 0.00015 \
       --clip-grad 1.0 \
       --checkpoint-activations \
       --fp16
